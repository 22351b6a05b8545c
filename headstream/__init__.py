"""headstream: take a decoder-only transformer apart, and say how well each statement is known.

Names load on first use, so that `import headstream` costs no torch; `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"
