"""Starting the product: the command line, local processes, the model, Redis."""
