"""Interfaces of other libraries, implemented by vramp: see the modules of this package."""
