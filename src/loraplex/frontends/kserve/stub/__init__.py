"""Code that runs in a process of the real Triton, in its Python backend.

`loraplex compat triton export` copies this folder into a model repository or a backend directory,
where it has another name and another Python: it imports Python's library, numpy, msgspec and itself
by relative imports, and it runs on Python 3.10.

    wire        messages and frames; our serving process reads and writes the same ones
    connection  one connection to a serving process
    server      starts a serving process, or joins the one that is there
    link        a connection that comes back after a loss
    tensors     tensors of the Python backend to wire tensors, and back
    model       the class that the Python backend calls
"""
