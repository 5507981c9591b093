"""The gated MLP: gate and up projection, SiLU, product, down projection."""
