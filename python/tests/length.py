"""How much a run of the tests covers: a short one is what everybody waits for, a long one is for
`cargo xtask nightly`, which sets the variable of the Rust tests too.
"""

import os

LONG = int(os.environ.get("VRAMP_TEST_LENGTH", "1")) > 1

CYCLES = 100_000 if LONG else 4_000
"""How many objects live and end, one after the other, before a test looks at what they left."""

LEFT_BYTES = 4 << 20 if LONG else 1 << 20
"""How much more memory a process may have then. In a long run 40 bytes of each would be found, in a short one
260.
"""
