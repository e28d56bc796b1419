//! The fields of a snapshot's dicts: names, conversions and error messages.

use super::values::{Node, TextId, Value, Values};
use crate::{EventKind, PoolId, ReadError};

/// The keys of a snapshot. They are interned first, after the names of the known actions, so that
/// comparing keys is comparing numbers.
pub mod key {
    use super::{EventKind, TextId};

    macro_rules! keys {
        ($($name:ident = $text:literal),* $(,)?) => {
            #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
            enum Place { $($name),* }
            $(pub const $name: TextId =
                TextId(EventKind::NAMED.len() as u32 + Place::$name as u32);)*
            /// Returns every known text in the order of its id.
            pub fn all() -> impl Iterator<Item = &'static str> {
                let actions = EventKind::NAMED.into_iter().filter_map(EventKind::known_name);
                actions.chain([$($text),*])
            }
        };
    }

    keys! {
        // The outermost dict.
        DEVICE_TRACES = "device_traces", SEGMENTS = "segments",
        ALLOCATOR_SETTINGS = "allocator_settings",
        EXTERNAL_ANNOTATIONS = "external_annotations",
        // Events.
        ACTION = "action", ADDR = "addr", SIZE = "size", STREAM = "stream", TIME_US = "time_us",
        FRAMES = "frames", DEVICE_FREE = "device_free",
        // Labels of events and blocks.
        USER_METADATA = "user_metadata", COMPILE_CONTEXT = "compile_context",
        NO_CONTEXT = "N/A", POOL_ID = "pool_id", CATEGORY = "category",
        // Frames.
        NAME = "name", FILENAME = "filename", LINE = "line",
        // Segments and blocks.
        DEVICE = "device", ADDRESS = "address", TOTAL_SIZE = "total_size",
        SEGMENT_TYPE = "segment_type", IS_EXPANDABLE = "is_expandable", BLOCKS = "blocks",
        REQUESTED_SIZE = "requested_size", STATE = "state",
        ACTIVE_ALLOCATED = "active_allocated", ACTIVE_PENDING_FREE = "active_pending_free",
        ACTIVE_AWAITING_FREE = "active_awaiting_free", INACTIVE = "inactive",
        SEGMENT_POOL_ID = "segment_pool_id", HISTORY = "history", REAL_SIZE = "real_size",
        // Annotations.
        STAGE = "stage",
    }
}

/// Location of a value, formatted only for an error message.
#[derive(Clone, Copy)]
pub enum Place {
    Event { index: u32, device: u32 },
    Segment { index: usize },
    Block { index: usize, segment: usize },
    Annotation { index: usize },
}

impl Place {
    #[cold]
    pub fn bad(
        self,
        field: &'static str,
        value: Option<Value>,
        values: &Values,
        expected: &'static str,
    ) -> ReadError {
        let place = match self {
            Place::Event { index, device } => format!("event {index} of device {device}"),
            Place::Segment { index } => format!("segment {index}"),
            Place::Block { index, segment } => format!("block {index} of segment {segment}"),
            Place::Annotation { index } => format!("annotation {index}"),
        };
        ReadError::BadField { place, field, found: describe(value, values), expected }
    }
}

pub fn describe(value: Option<Value>, values: &Values) -> String {
    match value {
        None => "missing".to_owned(),
        Some(Value::None) => "None".to_owned(),
        Some(Value::Bool(flag)) => if flag { "True" } else { "False" }.to_owned(),
        Some(Value::Int(int)) => int.to_string(),
        Some(Value::Big(int)) => int.to_string(),
        Some(Value::Huge) => "an integer of more than 64 bits".to_owned(),
        Some(Value::Float(float)) => float.to_string(),
        Some(Value::Text(id)) => {
            format!("{:?}", values.text(id).chars().take(40).collect::<String>())
        }
        Some(Value::Opaque) => "bytes or a set".to_owned(),
        Some(Value::Node(id)) => match values.node(id) {
            Node::List(_) | Node::Histories(_) | Node::History { .. } | Node::Stack(_) => "a list",
            Node::Tuple(_) => "a tuple",
            Node::Dict(_) | Node::Frame(_) => "a dict",
            Node::Taken => "a container used elsewhere too",
        }
        .to_owned(),
    }
}

pub fn unsigned(value: Value) -> Option<u64> {
    match value {
        Value::Int(int) => u64::try_from(int).ok(),
        Value::Big(int) => Some(int),
        _ => None,
    }
}

/// A stream is a pointer that PyTorch writes as a signed integer. Only its bits matter.
pub fn stream_bits(value: Value) -> Option<u64> {
    match value {
        Value::Int(int) => Some(int.cast_unsigned()),
        Value::Big(int) => Some(int),
        _ => None,
    }
}

/// Returns the id of a memory pool, which is a pair of integers. The pair may be shared.
pub fn pool_id(values: &Values, value: Value) -> Option<PoolId> {
    let Value::Node(id) = value else { return None };
    match values.node(id) {
        Node::Tuple(items) | Node::List(items) => match items[..] {
            [first, second] => {
                Some(PoolId(stream_bits(first)?.cast_signed(), stream_bits(second)?.cast_signed()))
            }
            _ => None,
        },
        _ => None,
    }
}

/// Returns the items of a dict stored as keys and values in turn. A later key wins, as in Python.
pub fn pairs(items: &[Value]) -> impl Iterator<Item = (TextId, Value)> {
    items.chunks_exact(2).filter_map(|pair| match pair {
        [Value::Text(key), value] => Some((*key, *value)),
        _ => None,
    })
}

pub const INTEGER: &str = "a whole number from 0 to 2^64 - 1";
pub const DICT: &str = "a dict";
pub const LIST: &str = "a list";
pub const PAIR: &str = "a pair of integers";

/// Takes the contents of a dict. Returns `None` if it is not a dict or was taken before.
pub fn take_dict(values: &mut Values, value: Value) -> Option<Vec<Value>> {
    let Value::Node(id) = value else { return None };
    match values.node_mut(id) {
        Node::Dict(items) => {
            let items = std::mem::take(items);
            *values.node_mut(id) = Node::Taken;
            Some(items)
        }
        _ => None,
    }
}

/// Takes the contents of a list. Returns `None` if it is not a list or was taken before.
pub fn take_list(values: &mut Values, value: Value) -> Option<Vec<Value>> {
    let Value::Node(id) = value else { return None };
    match values.node_mut(id) {
        Node::List(items) => {
            let items = std::mem::take(items);
            *values.node_mut(id) = Node::Taken;
            Some(items)
        }
        _ => None,
    }
}
