"""The choice of a batch's next tokens as one operation, which a GPU makes without a word to the CPU.

- `ops` says what it means, and `reference` is the choice in PyTorch.
- `kernels` makes it with several programs a row; `cut.kernels` is their search for the end of the kept tokens, and
  `rows.kernels` what both read and compute of a token.
"""
