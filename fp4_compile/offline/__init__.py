"""Code for a GPU on a machine that has none: `compile_for` writes the whole program, PTX and cubins, and a summary."""
