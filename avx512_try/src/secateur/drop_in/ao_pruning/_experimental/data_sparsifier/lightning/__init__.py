"""Lightning callbacks for data sparsifiers. Nothing here is imported unless asked for."""
