"""What lies in a slab, the handle that names it, and its conversion for a worker whose layout differs."""
