"""DeepSeek-V3: latent attention, and mixtures of experts balanced by a bias of the router (arXiv 2412.19437)."""
