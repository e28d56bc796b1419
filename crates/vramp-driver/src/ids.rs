//! Ids of the objects that a device creates.

macro_rules! opaque_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u64);

        impl $name {
            /// Returns the id with this number. Only the device that issued the number accepts it.
            pub const fn from_number(number: u64) -> $name {
                $name(number)
            }

            /// Returns the number, for output and for C.
            pub const fn number(self) -> u64 {
                self.0
            }
        }
    };
}

opaque_id! {
    /// Physical memory that [`Driver::create`](crate::Driver::create) allocated.
    Handle
}
opaque_id! {
    /// A stream. Its work runs in the order in which it was queued.
    Stream
}
opaque_id! {
    /// A point in a stream's work that can be queried, waited for or synchronised. Never carries
    /// timing.
    Event
}
opaque_id! {
    /// Pinned host memory, allocated by the driver or registered with it. Copies from and to it run
    /// at full speed.
    HostBuffer
}
opaque_id! {
    /// A captured graph, not yet instantiated.
    Graph
}
opaque_id! {
    /// An instantiated graph, which can be launched.
    GraphExec
}
opaque_id! {
    /// A node of a graph: one piece of captured work. Valid while its capture or its graph lives.
    GraphNode
}
