"""In place of the C++ compiler: writes the library FAKE_EXTENSION to the file that -o names.

    FAKE_COMPILER_LOG    a line with its process is appended for each call
    FAKE_COMPILER_GATE   a named pipe that is opened for reading first: the call waits for a writer
    FAKE_COMPILER_FAILS  `nothing` to write no file, `text` to write one that cannot be loaded
"""

import os
import shutil
import sys

to = sys.argv[sys.argv.index("-o") + 1]
with open(os.environ["FAKE_COMPILER_LOG"], "a") as log:
    log.write(f"{os.getpid()}\n")
if gate := os.environ.get("FAKE_COMPILER_GATE"):
    with open(gate) as pipe:
        pipe.read()
if os.environ.get("FAKE_COMPILER_FAILS") == "text":
    with open(to, "w") as written:
        written.write("no library\n" * 1000)
elif not os.environ.get("FAKE_COMPILER_FAILS"):
    shutil.copyfile(os.environ["FAKE_EXTENSION"], to)
