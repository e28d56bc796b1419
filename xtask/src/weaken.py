"""Lets programs without Python load the native module of a wheel, for `vramp exec --pool`: the interpreter's
functions become weak, so that the dynamic linker does not insist on them. What is called from C needs none.

    python weaken.py WHEEL
"""

import base64
import hashlib
import os
import struct
import sys
import zipfile

MODULE = "vramp/_native.abi3.so"
DYNAMIC_SYMBOLS = 11
SYMBOL_BYTES = 24
STRONG, WEAK = 1, 2


def weaken(elf: bytearray) -> int:
    """Makes undefined symbols of Python weak, in an ELF file of 64 bits. Returns their number."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count = struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + at * entry) for at in range(count)]
    _, _, _, _, start, size, names, *_ = next(it for it in sections if it[1] == DYNAMIC_SYMBOLS)
    names_start = sections[names][4]
    changed = 0
    for at in range(start, start + size, SYMBOL_BYTES):
        name, info, _, section = struct.unpack_from("<IBBH", elf, at)
        text = bytes(elf[names_start + name : elf.index(0, names_start + name)])
        if section == 0 and info >> 4 == STRONG and text.startswith((b"Py", b"_Py")):
            elf[at + 4] = WEAK << 4 | info & 15
            changed += 1
    return changed


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as old:
        contents = [(info, old.read(info)) for info in old.infolist()]
    module = bytearray(next(data for info, data in contents if info.filename == MODULE))
    if not weaken(module):
        sys.exit(f"{wheel}: {MODULE} needs no function of Python: was it changed already?")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module).digest()).rstrip(b"=").decode()
    new = wheel + ".new"
    with zipfile.ZipFile(new, "w") as out:
        for info, data in contents:
            if info.filename == MODULE:
                data = bytes(module)
            elif info.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                record = f"{MODULE},sha256={digest},{len(module)}\n"
                data = "".join(record if line.startswith(MODULE + ",") else line for line in lines).encode()
            out.writestr(info, data, zipfile.ZIP_DEFLATED)
    os.replace(new, wheel)


main(sys.argv[1])
