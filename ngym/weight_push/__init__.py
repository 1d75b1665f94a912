"""Weight pushes into a model server: its routes, over any engine that can load weights, and the files on their way. Imports torch."""
