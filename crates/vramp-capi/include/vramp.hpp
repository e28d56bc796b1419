// Deferrable buffers, regions and kept memory of vramp for C++11 and later, over the C interface.
//
// Deferrable buffers have the words of RMMEP-1:
//
//     vramp::buffer input(allocator, bytes), output(allocator, bytes);
//     vramp::lock_and_launch_async(
//         allocator, stream,
//         [](vramp_stream_t stream, const vramp::buffer &from, vramp::buffer &to) {
//             // launch a kernel on the stream, from from.get() to to.get()
//         },
//         vramp::reads(input), output);
//     vramp::sync_and_unlock(allocator, stream);
//
// Buffers among the arguments are found by their type: each is leased for reading and writing, for
// reading where it is wrapped in vramp::reads(), and for writing all of it without a copy of its old
// contents where it is wrapped in vramp::overwrites(). All of them are leased together, or none.
//
// Regions leave the card by tag, and come back at the same addresses:
//
//     {
//         vramp::region weights(allocator, "weights");
//         vramp::check(vramp_malloc(allocator, bytes, stream, &block));
//     }
//     vramp::pause(allocator, {"weights"});
//     vramp::resume(allocator, {"weights"});
//
// vramp::around_sleep registers what ends before that and is made again after it.
//
// Kept memory outlives its process, because a keeper holds it under a name:
//
//     vramp::keeper keeper(allocator, directory);
//     vramp::kept weights(keeper, "model/0");
//
// Errors are exceptions; a destructor throws none.

#ifndef VRAMP_HPP
#define VRAMP_HPP

#include "vramp.h"

#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace vramp {

/// A call that failed, with the message of the thread.
class error : public std::runtime_error {
public:
    explicit error(vramp_status_t status)
        : std::runtime_error(std::string(vramp_status_name(static_cast<int>(status))) + ": " +
                             vramp_last_error()),
          status_(status) {}

    vramp_status_t status() const noexcept { return status_; }

private:
    vramp_status_t status_;
};

/// Throws unless the status is that of success.
inline void check(vramp_status_t status) {
    if (status != VRAMP_OK) throw error(status);
}

/// A deferrable buffer. Copies are the same buffer, which ends with the last of them. Its contents may
/// leave the card while no lease holds it; its address stays.
class buffer {
public:
    buffer(vramp_allocator_t allocator, std::size_t bytes)
        : owner_(std::make_shared<owner>(allocator, bytes)) {}

    /// Returns its handle, which is never reused: it serves as an id and as a hash.
    vramp_buffer_t handle() const noexcept { return owner_->handle; }
    vramp_allocator_t allocator() const noexcept { return owner_->allocator; }
    /// Returns its address. Memory is behind it only under a lease.
    void *get() const noexcept { return owner_->address; }
    std::size_t size() const noexcept { return owner_->bytes; }

    /// Returns its state now.
    vramp_buffer_info_t info() const { return owner_->info(); }
    bool is_deferred() const { return info().state == VRAMP_BUFFER_DEFERRED; }
    bool is_locked() const { return info().leases > 0; }

    /// Restores its contents. Without a lease it may leave again at once.
    void retrieve(uint64_t timeout_ns = VRAMP_FOREVER) const {
        check(vramp_buffer_retrieve(allocator(), handle(), timeout_ns));
    }

    bool operator==(const buffer &other) const noexcept { return owner_ == other.owner_; }
    bool operator!=(const buffer &other) const noexcept { return owner_ != other.owner_; }

private:
    struct owner {
        vramp_allocator_t allocator;
        vramp_buffer_t handle;
        void *address;
        std::size_t bytes;

        owner(vramp_allocator_t of, std::size_t length)
            : allocator(of), handle(), address(nullptr), bytes(length) {
            check(vramp_buffer_create(of, length, &handle));
            try {
                address = info().address;
            } catch (...) {
                vramp_buffer_destroy(allocator, handle);
                throw;
            }
        }

        // The allocator may be closed by now: then the buffer has ended.
        ~owner() { vramp_buffer_destroy(allocator, handle); }

        owner(const owner &) = delete;
        owner &operator=(const owner &) = delete;

        vramp_buffer_info_t info() const {
            vramp_buffer_info_t found = vramp_buffer_info_t();
            found.struct_size = sizeof(found);
            check(vramp_buffer_info(allocator, handle, &found));
            return found;
        }
    };

    std::shared_ptr<owner> owner_;
};

/// An argument that the work only reads. The function gets it as a `const buffer &`.
class read_only {
public:
    explicit read_only(buffer of) : of_(std::move(of)) {}

    operator const buffer &() const noexcept { return of_; }
    const buffer &get() const noexcept { return of_; }

private:
    buffer of_;
};

/// Marks a buffer among the arguments as one that the work only reads.
inline read_only reads(buffer of) { return read_only(std::move(of)); }

/// An argument that the work overwrites as a whole. The function gets it as a `buffer &`.
class overwritten {
public:
    explicit overwritten(buffer of) : of_(std::move(of)) {}

    operator buffer &() noexcept { return of_; }
    const buffer &get() const noexcept { return of_; }

private:
    buffer of_;
};

/// Marks a buffer among the arguments as one that the work overwrites as a whole: contents that left the
/// card are not copied back.
inline overwritten overwrites(buffer of) { return overwritten(std::move(of)); }

namespace detail {

using uses = std::vector<vramp_buffer_use_t>;

inline void add(uses &all, const buffer &one) {
    all.push_back(vramp_buffer_use_t{one.handle(), VRAMP_ACCESS_WRITE});
}

inline void add(uses &all, const read_only &one) {
    all.push_back(vramp_buffer_use_t{one.get().handle(), VRAMP_ACCESS_READ});
}

inline void add(uses &all, const overwritten &one) {
    all.push_back(vramp_buffer_use_t{one.get().handle(), VRAMP_ACCESS_OVERWRITE});
}

/// Any other argument.
template <typename T>
void add(uses &, const T &) {}

inline void collect(uses &) {}

template <typename T, typename... Rest>
void collect(uses &all, const T &first, const Rest &...rest) {
    add(all, first);
    collect(all, rest...);
}

/// Ends the locks of a stream unless the work was launched.
class unlock_on_throw {
public:
    unlock_on_throw(vramp_allocator_t allocator, vramp_stream_t stream)
        : allocator_(allocator), stream_(stream), is_armed_(true) {}
    ~unlock_on_throw() {
        if (is_armed_) vramp_unlock(allocator_, stream_);
    }
    void release() noexcept { is_armed_ = false; }

    unlock_on_throw(const unlock_on_throw &) = delete;
    unlock_on_throw &operator=(const unlock_on_throw &) = delete;

private:
    vramp_allocator_t allocator_;
    vramp_stream_t stream_;
    bool is_armed_;
};

} // namespace detail

/// Restores the buffers among the arguments and locks them on the stream, until unlock() or
/// sync_and_unlock() of the stream.
template <typename... Args>
void retrieve_and_lock(vramp_allocator_t allocator, vramp_stream_t stream, const Args &...args) {
    detail::uses all;
    detail::collect(all, args...);
    check(vramp_lock(allocator, all.data(), all.size(), stream, VRAMP_FOREVER, nullptr));
}

/// Ends the locks of a stream at the work queued so far. Does not wait for it.
inline void unlock(vramp_allocator_t allocator, vramp_stream_t stream) {
    check(vramp_unlock(allocator, stream));
}

/// Waits for the work queued on a stream, and ends its locks.
inline void sync_and_unlock(vramp_allocator_t allocator, vramp_stream_t stream) {
    check(vramp_sync_and_unlock(allocator, stream));
}

/// Locks the buffers among the arguments on the stream and calls `function(stream, args...)`, which
/// queues work. The locks end with sync_and_unlock() or unlock() of the stream; at once if it throws.
template <typename Function, typename... Args>
void lock_and_launch_async(vramp_allocator_t allocator, vramp_stream_t stream, Function &&function,
                           Args &&...args) {
    retrieve_and_lock(allocator, stream, args...);
    detail::unlock_on_throw guard(allocator, stream);
    std::forward<Function>(function)(stream, std::forward<Args>(args)...);
    guard.release();
}

/// Locks the buffers among the arguments on the stream, calls `function(args...)`, waits for the work
/// that it queued, and ends the locks of the stream.
template <typename Function, typename... Args>
void lock_and_launch(vramp_allocator_t allocator, vramp_stream_t stream, Function &&function,
                     Args &&...args) {
    retrieve_and_lock(allocator, stream, args...);
    detail::unlock_on_throw guard(allocator, stream);
    std::forward<Function>(function)(std::forward<Args>(args)...);
    guard.release();
    sync_and_unlock(allocator, stream);
}

/// Returns options of a region.
inline vramp_region_options_t region_options(uint32_t backup, bool read_only = false) {
    vramp_region_options_t options = vramp_region_options_t();
    options.struct_size = sizeof(options);
    options.backup = backup;
    options.read_only = read_only;
    return options;
}

/// While it lives, blocks that the calling thread allocates are in the region with a tag, which it creates.
/// Regions nest, and the innermost one counts. It ends on the thread that made it.
class region {
public:
    region(vramp_allocator_t allocator, const std::string &tag) : scope_() {
        check(vramp_region_begin(allocator, tag.c_str(), nullptr, &scope_));
    }

    region(vramp_allocator_t allocator, const std::string &tag, const vramp_region_options_t &options)
        : scope_() {
        check(vramp_region_begin(allocator, tag.c_str(), &options, &scope_));
    }

    ~region() { vramp_region_end(scope_); }

    region(const region &) = delete;
    region &operator=(const region &) = delete;

private:
    vramp_region_scope_t scope_;
};

/// While it lives, blocks that the calling thread allocates are in no region.
class disable_region {
public:
    explicit disable_region(vramp_allocator_t allocator) : scope_() {
        check(vramp_region_disable(allocator, &scope_));
    }

    ~disable_region() { vramp_region_end(scope_); }

    disable_region(const disable_region &) = delete;
    disable_region &operator=(const disable_region &) = delete;

private:
    vramp_region_scope_t scope_;
};

/// Tags of regions.
using tags = std::vector<std::string>;

namespace detail {

/// Tags as C has them. Without tags it is not null, which would mean all regions.
class c_tags {
public:
    explicit c_tags(const tags &of) {
        for (const std::string &tag : of) texts_.push_back(tag.c_str());
        texts_.push_back(nullptr);
    }

    const char *const *data() const noexcept { return texts_.data(); }
    std::size_t size() const noexcept { return texts_.size() - 1; }

private:
    std::vector<const char *> texts_;
};

} // namespace detail

/// Removes a region without live blocks. Throws, and changes nothing, if it has memory or is in use.
inline void remove_region(vramp_allocator_t allocator, const char *tag) {
    check(vramp_region_remove(allocator, tag));
}

/// Puts regions to sleep: at most `keep` bytes of each stay on the card. With `discard` contents are given up
/// instead of copied.
inline void pause(vramp_allocator_t allocator, const tags &of, uint64_t keep = 0,
                  bool discard = false) {
    vramp_pause_options_t options = vramp_pause_options_t();
    options.struct_size = sizeof(options);
    options.keep = keep;
    options.discard = discard;
    const detail::c_tags all(of);
    check(vramp_region_pause(allocator, all.data(), all.size(), &options));
}

/// Puts all regions to sleep.
inline void pause(vramp_allocator_t allocator) {
    check(vramp_region_pause(allocator, nullptr, 0, nullptr));
}

/// Brings regions back to their addresses.
inline void resume(vramp_allocator_t allocator, const tags &of) {
    const detail::c_tags all(of);
    check(vramp_region_resume(allocator, all.data(), all.size()));
}

/// Brings all regions back.
inline void resume(vramp_allocator_t allocator) {
    check(vramp_region_resume(allocator, nullptr, 0));
}

/// While it lives, `before` is called before memory of regions leaves the card, and `after` after it is back: what
/// vramp_region_around_sleep says. One that throws has failed; `failure()` returns what the last one threw.
class around_sleep {
public:
    using callback = std::function<void()>;

    /// Covers all regions, also later ones.
    around_sleep(vramp_allocator_t allocator, const std::string &name, callback before, callback after,
                 bool is_collective = false)
        : around_sleep(allocator, name, nullptr, std::move(before), std::move(after), is_collective) {}

    /// Covers the regions with these tags.
    around_sleep(vramp_allocator_t allocator, const std::string &name, const tags &of, callback before,
                 callback after, bool is_collective = false)
        : around_sleep(allocator, name, &of, std::move(before), std::move(after), is_collective) {}

    /// Waits for a call in progress on another thread.
    ~around_sleep() { vramp_unobserve(allocator_, registration_); }

    around_sleep(const around_sleep &) = delete;
    around_sleep &operator=(const around_sleep &) = delete;

    /// Returns what the last callback that failed threw. Not while one may run.
    std::exception_ptr failure() const { return failure_; }

private:
    around_sleep(vramp_allocator_t allocator, const std::string &name, const tags *of, callback before,
                 callback after, bool is_collective)
        : allocator_(allocator), before_(std::move(before)), after_(std::move(after)) {
        vramp_sleep_callbacks_t pair = vramp_sleep_callbacks_t();
        pair.struct_size = sizeof(pair);
        pair.name = name.c_str();
        pair.before = &around_sleep::before;
        pair.after = &around_sleep::after;
        pair.user = this;
        pair.is_collective = is_collective;
        const tags none;
        const detail::c_tags all(of ? *of : none);
        check(vramp_region_around_sleep(allocator, of ? all.data() : nullptr, all.size(), &pair,
                                        &registration_));
    }

    static int before(void *user) {
        around_sleep *self = static_cast<around_sleep *>(user);
        return self->call(self->before_);
    }

    static int after(void *user) {
        around_sleep *self = static_cast<around_sleep *>(user);
        return self->call(self->after_);
    }

    int call(const callback &function) noexcept {
        try {
            if (function) function();
            return 0;
        } catch (...) {
            failure_ = std::current_exception();
            return 1;
        }
    }

    vramp_allocator_t allocator_;
    callback before_;
    callback after_;
    std::exception_ptr failure_;
    uint64_t registration_ = 0;
};

/// Copies the contents of regions ahead, so that the next pause copies nothing.
inline void clean(vramp_allocator_t allocator, const tags &of) {
    const detail::c_tags all(of);
    check(vramp_region_clean(allocator, all.data(), all.size()));
}

/// Reads contents on the disk into pinned host memory, ahead of a resume.
inline void prefetch(vramp_allocator_t allocator, const tags &of) {
    const detail::c_tags all(of);
    check(vramp_region_prefetch(allocator, all.data(), all.size()));
}

/// Returns the states of all regions, in the order of their tags.
inline std::vector<vramp_region_status_t> region_status(vramp_allocator_t allocator) {
    std::vector<vramp_region_status_t> found;
    std::size_t count = 0;
    check(vramp_region_status(allocator, nullptr, 0, &count));
    do {
        found.assign(count, vramp_region_status_t());
        if (count > 0) found[0].struct_size = sizeof(vramp_region_status_t);
        check(vramp_region_status(allocator, found.data(), found.size(), &count));
        // Another thread may have made regions meanwhile.
    } while (count > found.size());
    found.resize(count);
    return found;
}

/// The keeper of a directory, a process that other processes find too. It may end before memory that was opened with
/// it, and ends before the allocator is closed.
class keeper {
public:
    /// A keeper that is silent for `timeout_ns` is an error; zero is 5 s.
    keeper(vramp_allocator_t allocator, const std::string &directory, uint64_t timeout_ns = 0)
        : allocator_(allocator), handle_() {
        check(vramp_keeper_open(allocator, directory.c_str(), timeout_ns, &handle_));
    }

    ~keeper() { end(); }

    keeper(keeper &&other) noexcept : allocator_(other.allocator_), handle_(other.release()) {}

    keeper &operator=(keeper &&other) noexcept {
        if (this != &other) {
            end();
            allocator_ = other.allocator_;
            handle_ = other.release();
        }
        return *this;
    }

    vramp_allocator_t allocator() const noexcept { return allocator_; }
    vramp_keeper_t handle() const noexcept { return handle_; }

    /// Returns the names that it has, in order.
    std::vector<vramp_kept_entry_t> entries() const {
        std::vector<vramp_kept_entry_t> found;
        std::size_t count = 0;
        check(vramp_keeper_entries(allocator_, handle_, nullptr, 0, &count));
        do {
            found.assign(count, vramp_kept_entry_t());
            if (count > 0) found[0].struct_size = sizeof(vramp_kept_entry_t);
            check(vramp_keeper_entries(allocator_, handle_, found.data(), found.size(), &count));
            // Another process may have made some meanwhile.
        } while (count > found.size());
        found.resize(count);
        return found;
    }

    /// Removes a name. Processes that have its memory open keep it.
    void remove(const std::string &name) const {
        check(vramp_keeper_remove(allocator_, handle_, name.c_str()));
    }

    /// Frees memory of the card that no process has open, until `bytes` were freed. Returns how many were.
    uint64_t evict(uint64_t bytes) const {
        uint64_t freed = 0;
        check(vramp_keeper_evict(allocator_, handle_, bytes, &freed));
        return freed;
    }

private:
    void end() noexcept {
        if (handle_.id != 0) vramp_keeper_close(allocator_, handle_);
    }

    vramp_keeper_t release() noexcept {
        const vramp_keeper_t handle = handle_;
        handle_ = vramp_keeper_t();
        return handle;
    }

    vramp_allocator_t allocator_;
    vramp_keeper_t handle_;
};

/// Returns options of kept memory with room for so many bytes.
inline vramp_kept_options_t kept_options(uint64_t bytes) {
    vramp_kept_options_t options = vramp_kept_options_t();
    options.struct_size = sizeof(options);
    options.bytes = bytes;
    return options;
}

/// Returns options for opening kept memory.
inline vramp_kept_open_options_t kept_open_options(bool writable = false,
                                                   uint32_t lock = VRAMP_KEPT_READ) {
    vramp_kept_open_options_t options = vramp_kept_open_options_t();
    options.struct_size = sizeof(options);
    options.writable = writable;
    options.lock = lock;
    return options;
}

namespace detail {

/// A handle of kept memory, which is closed at its end.
class kept_handle {
public:
    ~kept_handle() { end(); }

    kept_handle(kept_handle &&other) noexcept
        : allocator_(other.allocator_), handle_(other.release()) {}

    kept_handle &operator=(kept_handle &&other) noexcept {
        if (this != &other) {
            end();
            allocator_ = other.allocator_;
            handle_ = other.release();
        }
        return *this;
    }

    vramp_allocator_t allocator() const noexcept { return allocator_; }
    vramp_kept_t handle() const noexcept { return handle_; }

    /// Returns its state now. No message.
    vramp_kept_state_t state() const {
        vramp_kept_state_t found = vramp_kept_state_t();
        found.struct_size = sizeof(found);
        check(vramp_kept_state(allocator_, handle_, &found));
        return found;
    }

    /// Records that work queued on a stream, so far and from now on, uses the memory.
    void record_use(vramp_stream_t stream) const {
        check(vramp_kept_record_use(allocator_, handle_, stream));
    }

    /// Waits for recorded work and closes it. Throws if that fails; the destructor does not.
    void close() { check(vramp_kept_close(allocator_, release())); }

protected:
    explicit kept_handle(vramp_allocator_t allocator) : allocator_(allocator), handle_() {}

    vramp_kept_t release() noexcept {
        const vramp_kept_t handle = handle_;
        handle_ = vramp_kept_t();
        return handle;
    }

    vramp_allocator_t allocator_;
    vramp_kept_t handle_;

private:
    // The allocator may be closed by now: then the memory has ended.
    void end() noexcept {
        if (handle_.id != 0) vramp_kept_close(allocator_, handle_);
    }
};

} // namespace detail

/// Memory of a name that no other process sees yet. It is freed at its end, unless it was committed.
class kept_draft : public detail::kept_handle {
public:
    /// Waits for another draft of the name.
    kept_draft(const keeper &of, const std::string &name, const vramp_kept_options_t &options,
               uint64_t timeout_ns = VRAMP_FOREVER)
        : kept_handle(of.allocator()) {
        check(vramp_kept_draft(of.allocator(), of.handle(), name.c_str(), &options, timeout_ns,
                               &handle_));
    }

    /// Returns the address of so many bytes.
    void *place(std::size_t bytes) const {
        void *address = nullptr;
        check(vramp_kept_place(allocator_, handle_, bytes, &address));
        return address;
    }

    friend class kept;
};

/// Memory of a name, at its address in this process. Memory that was opened for reading only must not be written.
class kept : public detail::kept_handle {
public:
    explicit kept(const keeper &of, const std::string &name,
                  const vramp_kept_open_options_t &options = kept_open_options(),
                  uint64_t timeout_ns = VRAMP_FOREVER)
        : kept_handle(of.allocator()) {
        check(vramp_kept_open(of.allocator(), of.handle(), name.c_str(), &options, timeout_ns,
                              &handle_));
    }

    /// Commits a draft, whose addresses stay. If it throws the draft has private memory, as vramp_kept_commit says.
    kept(kept_draft &&draft, const std::string &layout, const std::array<uint8_t, 32> &digest,
         bool writable = false)
        : kept_handle(draft.allocator()) {
        check(vramp_kept_commit(allocator_, draft.handle(), layout.data(), layout.size(),
                                digest.data(), writable));
        handle_ = draft.release();
    }

    void *get() const { return state().address; }
    std::size_t size() const { return static_cast<std::size_t>(state().bytes); }
    uint64_t epoch() const { return state().epoch; }

    /// Returns the publisher's layout.
    std::string layout() const {
        std::string found(static_cast<std::size_t>(state().layout_bytes), '\0');
        std::size_t length = 0;
        check(vramp_kept_layout(allocator_, handle_, &found[0], found.size(), &length));
        return found;
    }

    /// Takes the lock for reading, and returns the epoch.
    uint64_t read(uint64_t timeout_ns = VRAMP_FOREVER) const {
        uint64_t epoch = 0;
        check(vramp_kept_read(allocator_, handle_, timeout_ns, &epoch));
        return epoch;
    }

    /// Takes the lock for writing, and returns the epoch before. Commit what is written: otherwise it is torn.
    uint64_t write(uint64_t timeout_ns = VRAMP_FOREVER) const {
        uint64_t epoch = 0;
        check(vramp_kept_write(allocator_, handle_, timeout_ns, &epoch));
        return epoch;
    }

    /// Gives the lock for reading back.
    void unlock() const { check(vramp_kept_unlock(allocator_, handle_)); }

    /// Lets a waiting writer write, and takes the lock for reading again. Returns the epoch.
    uint64_t yield_to_writer(uint64_t timeout_ns = VRAMP_FOREVER) const {
        uint64_t epoch = 0;
        check(vramp_kept_yield_to_writer(allocator_, handle_, timeout_ns, &epoch));
        return epoch;
    }

    /// Makes what was written the next epoch, and returns its number. `then` is the lock that is kept.
    uint64_t commit_update(uint32_t then = VRAMP_KEPT_UNLOCKED) const {
        uint64_t epoch = 0;
        check(vramp_kept_commit_update(allocator_, handle_, then, &epoch));
        return epoch;
    }

    /// Gives the lock for writing back, if nothing was written.
    void release_unchanged() const { check(vramp_kept_release_unchanged(allocator_, handle_)); }

    /// Waits until the name has a later epoch than `than`, and returns its number.
    uint64_t wait_newer(uint64_t than, uint64_t timeout_ns = VRAMP_FOREVER) const {
        uint64_t epoch = 0;
        check(vramp_kept_wait_newer(allocator_, handle_, than, timeout_ns, &epoch));
        return epoch;
    }
};

} // namespace vramp

#endif
