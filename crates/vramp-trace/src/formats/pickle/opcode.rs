//! The pickle opcodes, with their numbers and their names in Python's pickletools.

/// Declares each opcode once, as a constant and as a name.
macro_rules! opcodes {
    ($($name:ident = $code:literal),* $(,)?) => {
        $(pub const $name: u8 = $code;)*

        /// Returns the name of the opcode, or `None` if the byte is not an opcode.
        pub const fn name(code: u8) -> Option<&'static str> {
            match code {
                $($name => Some(stringify!($name)),)*
                _ => None,
            }
        }
    };
}

opcodes! {
    MARK = b'(', STOP = b'.', POP = b'0', POP_MARK = b'1', DUP = b'2',
    FLOAT = b'F', INT = b'I', LONG = b'L', STRING = b'S', UNICODE = b'V',
    BININT = b'J', BININT1 = b'K', BININT2 = b'M', BINFLOAT = b'G', NONE = b'N',
    BINSTRING = b'T', SHORT_BINSTRING = b'U', BINUNICODE = b'X',
    PERSID = b'P', BINPERSID = b'Q', REDUCE = b'R', BUILD = b'b', GLOBAL = b'c',
    INST = b'i', OBJ = b'o',
    APPEND = b'a', APPENDS = b'e', EMPTY_LIST = b']', LIST = b'l',
    EMPTY_DICT = b'}', DICT = b'd', SETITEM = b's', SETITEMS = b'u',
    EMPTY_TUPLE = b')', TUPLE = b't',
    GET = b'g', BINGET = b'h', LONG_BINGET = b'j', PUT = b'p', BINPUT = b'q', LONG_BINPUT = b'r',
    BINBYTES = b'B', SHORT_BINBYTES = b'C',
    PROTO = 0x80, NEWOBJ = 0x81, EXT1 = 0x82, EXT2 = 0x83, EXT4 = 0x84,
    TUPLE1 = 0x85, TUPLE2 = 0x86, TUPLE3 = 0x87, NEWTRUE = 0x88, NEWFALSE = 0x89,
    LONG1 = 0x8a, LONG4 = 0x8b, SHORT_BINUNICODE = 0x8c, BINUNICODE8 = 0x8d, BINBYTES8 = 0x8e,
    EMPTY_SET = 0x8f, ADDITEMS = 0x90, FROZENSET = 0x91, NEWOBJ_EX = 0x92, STACK_GLOBAL = 0x93,
    MEMOIZE = 0x94, FRAME = 0x95, BYTEARRAY8 = 0x96, NEXT_BUFFER = 0x97, READONLY_BUFFER = 0x98,
}
