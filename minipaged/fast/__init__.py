"""Above the rungs: what makes a step fast without changing what it computes.

Rungs do not know this package; it wraps any of them from `batching` up. `ops`, `reference` and `kernels` hold
operations that do the work of several of the rungs' own in one launch, or one of them better for few rows.
"""
