"""One module or folder per broker; siblings never see each other."""
