"""Attention of a mixed batch's prompts, whole or in chunks."""
