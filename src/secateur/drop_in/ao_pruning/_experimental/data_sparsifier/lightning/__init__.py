"""Lightning callbacks for data sparsifiers. The rest of the package does not import them."""
