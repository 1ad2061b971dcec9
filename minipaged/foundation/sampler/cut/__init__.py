"""Where top_k, top_p and min_p cut a row of logits."""
