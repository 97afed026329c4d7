"""Optional rooms, each on its own. Nothing above imports them: `registry` imports each package that it finds here.

An extension's `__init__.py` adds what it offers to the registry: a scheme, an exporter, flags of main.py and their
checks. It imports no TensorFlow. Without this folder, the rest of the package works, and lacks these names and flags.
"""
