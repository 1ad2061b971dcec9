"""Above the rungs: what makes a step fast without changing what it computes.

Rungs do not know this package; it wraps any of them from `batching` up, in four steps that can be switched off alone::

    engine        LLM.engine: a rung's engine, and what follows
    overlap         plan the next step while the GPU computes this one
    device_batch    block tables, settings and tokens stay on the GPU      (inputs, rows)
    graphs          decode steps of a few fixed sizes, each launched as a whole
    fused           packed weights, and kernels that do the work of several

`ops`, `reference` and `kernels` hold operations that do the work of several of the rungs' own in one launch, or one of
them better for few rows.
"""
