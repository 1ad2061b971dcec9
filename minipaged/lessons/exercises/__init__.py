"""The checks of the exercises, one module a lesson: each compares an answer with the product's own code."""
