//! The planted bugs. Each breaks one promise of `docs/background/life-cycles.md`.

/// A change of one place that breaks a promise.
pub struct Plant {
    /// What is broken.
    pub breaks: &'static str,
    /// Path of the file from the workspace's root.
    pub file: &'static str,
    /// Text that occurs exactly once in it.
    pub old: &'static str,
    /// Text in its place.
    pub new: &'static str,
}

/// Every planted bug.
pub const PLANTS: [Plant; 23] = [
    Plant {
        breaks: "the event at a stream's end is not recorded",
        file: "crates/vramp-alloc/src/stream_end.rs",
        old: "Ok(driver.record_outside(event, stream)?.then(|| Arc::new(end)))",
        new: "let _ = stream;\n        Ok(Some(Arc::new(end)))",
    },
    Plant {
        breaks: "closing does not wait for the work of destroyed streams",
        file: "crates/vramp-alloc/src/shared.rs",
        old: "ends.extend(self.group.ends());",
        new: "let _ = self.group.ends();",
    },
    Plant {
        breaks: "closing does not wait for the work of open streams",
        file: "crates/vramp-alloc/src/shared.rs",
        old: "Ok(Some(end)) => ends.push(end),",
        new: "Ok(Some(end)) => drop::<Arc<StreamEnd>>(end),",
    },
    Plant {
        breaks: "closing unmaps after a wait that failed",
        file: "crates/vramp-alloc/src/shared.rs",
        old: "            end.synchronize().map_err(CloseFailure::NotSynchronized)?;",
        new: "            let _ = end.synchronize();",
    },
    Plant {
        breaks: "thread caches and heaps serve a stream that ended",
        file: "crates/vramp-alloc/src/virtual_pool.rs",
        old: "        self.heap(stream).end();\n        self.drain_stream(stream);",
        new: "",
    },
    Plant {
        breaks: "work counts as over before its event is reached",
        file: "crates/vramp-alloc/src/completion.rs",
        old: "        if !is_reached(0)? {\n            return Ok(());",
        new: "        if !is_reached(0)? && last.epoch.number() % 2 == 0 {\n            return Ok(());",
    },
    Plant {
        breaks: "closing leaks the events that are not in use",
        file: "crates/vramp-alloc/src/completion.rs",
        old: "        for event in open.chain(self.stock.drain(..)) {",
        new: "        for event in open {",
    },
    Plant {
        breaks: "an event leaks at each stream's end",
        file: "crates/vramp-alloc/src/stream_end.rs",
        old: "        let _ = self.driver.destroy_event(self.event);",
        new: "        let _ = self.event;",
    },
    Plant {
        breaks: "uses of small blocks on other streams are not recorded",
        file: "crates/vramp-alloc/src/manager.rs",
        old: "                heap.note_use(id, mark).expect(\"the block was looked up\");",
        new: "                let _ = (id, mark, &mut heap);",
    },
    Plant {
        breaks: "memory in use on other streams is free at once",
        file: "crates/vramp-core/src/pool/state/free.rs",
        old: "        if marks.is_empty() {\n            self.make_free(key, stream, epoch);",
        new: "        if marks.len() < 100 {\n            self.make_free(key, stream, epoch);",
    },
    Plant {
        breaks: "a lease that ends forgets the work under it",
        file: "crates/vramp-alloc/src/arenas/replay.rs",
        old: "        let ended = self.arenas.get_mut(id).leases.end(lease, mark);",
        new: "        let _ = mark;\n        \
              let ended = self.arenas.get_mut(id).leases.cancel(lease);",
    },
    Plant {
        breaks: "a replay does not wait for other streams' work",
        file: "crates/vramp-alloc/src/arenas/replay.rs",
        old: "Some(event) => self.exec.driver.wait(self.exec.stream(stream), event)?,",
        new: "Some(_) => {}",
    },
    Plant {
        breaks: "a graph is launched without the memory that its arena lent",
        file: "crates/vramp-alloc/src/arenas/replay.rs",
        old: "        let ready = self.back(id, upto, stream).and_then(|()| {",
        new: "        let _ = upto;\n        \
              let ready = Ok::<(), Refusal>(()).and_then(|()| {",
    },
    Plant {
        breaks: "memory that a graph keeps is freed with the graph, under its launches",
        file: "crates/vramp-alloc/src/graph/mod.rs",
        old: "            leases.unfinished().map(|mark| mark.stream).chain(leases.holder()).collect();",
        new: "            leases.unfinished().map(|mark| mark.stream).chain(leases.holder()).take(0)\
              .collect();",
    },
    Plant {
        breaks: "memory of a dropped arena is reused under its last replay",
        file: "crates/vramp-alloc/src/arenas/mod.rs",
        old: "            let marks: Vec<Mark> = state.leases.unfinished().collect();",
        new: "            let marks: Vec<Mark> = state.leases.unfinished().take(0).collect();",
    },
    Plant {
        breaks: "memory of a dropped range is reused under the work that was recorded",
        file: "crates/vramp-alloc/src/range/mod.rs",
        old: "            pool.pool.remove_arena(self.id, &uses);",
        new: "            pool.pool.remove_arena(self.id, &[]);",
    },
    Plant {
        breaks: "a block that a capture uses is freed at once",
        file: "crates/vramp-alloc/src/allocator/free.rs",
        old: "            if let Some(arena) = pool.keeper_of(&allocation, stream) {",
        new: "            if let Some(arena) = pool.keeper_of(&allocation, stream).filter(|_| false) {",
    },
    Plant {
        breaks: "retired mappings are unmapped before the work on them is over",
        file: "crates/vramp-core/src/pool/plan/fill.rs",
        old: "            if !self.streams.is_over(mark) {\n                continue;\n            }",
        new: "            let _ = mark;",
    },
    Plant {
        breaks: "idle memory of other streams is taken over before their work is over",
        file: "crates/vramp-core/src/pool/state/idle.rs",
        old: "            let over = part.epoch <= reached;",
        new: "            let over = part.epoch <= reached.next();",
    },
    Plant {
        breaks: "a stream ends in one pool of its group only",
        file: "crates/vramp-alloc/src/shared.rs",
        old: "            self.manager.end_stream(id, Some(end));",
        new: "            let _ = end;",
    },
    Plant {
        breaks: "parked pages of caches are lent before their work is over",
        file: "crates/vramp-alloc/src/kv/core/pages.rs",
        old: "        self.add_lot(id, pages, marks, true);\n        Ok(())",
        new: "        self.add_lot(id, pages, Marks::new(), true);\n        let _ = marks;\n        Ok(())",
    },
    Plant {
        breaks: "a commit that was undone keeps the pages that were parked",
        file: "crates/vramp-alloc/src/kv/core/pages.rs",
        old: "            self.counts.committed -= pages.len() as u32;\n            let id = self.next_lot;\n            \
              self.next_lot += 1;\n            self.add_lot(id, pages, marks.clone(), true);",
        new: "            let _ = pages;",
    },
    Plant {
        breaks: "a page of a cache is lent under work that its commit was ordered behind",
        file: "crates/vramp-alloc/src/kv/core/pages.rs",
        old: "                    add_mark(&mut marks, now(by));",
        new: "                    let _ = (&mut marks, now(by));",
    },
];
