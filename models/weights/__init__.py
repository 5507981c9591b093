"""Weights of a model as flat NumPy dictionaries, read and written under the model's own names."""
