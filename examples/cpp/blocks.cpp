// An allocator and its blocks as types that free themselves, and errors as exceptions.
#include <vramp.h>

#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

static void check(vramp_status_t status) {
    if (status == VRAMP_OK) return;
    if (status == VRAMP_ERROR_OUT_OF_MEMORY) throw std::bad_alloc();
    throw std::runtime_error(std::string(vramp_status_name(status)) + ": " + vramp_last_error());
}

// Memory of a stream. Moves, and frees itself on its stream.
class Block {
public:
    Block(vramp_allocator_t allocator, std::size_t size, vramp_stream_t stream)
        : allocator_(allocator) {
        check(vramp_malloc(allocator, size, stream, &address_));
    }
    Block(Block &&other) noexcept : allocator_(other.allocator_), address_(other.address_) {
        other.address_ = nullptr;
    }
    Block(const Block &) = delete;
    Block &operator=(const Block &) = delete;
    Block &operator=(Block &&) = delete;
    ~Block() {
        // Fails only if the allocator is closed, which releases all blocks.
        if (address_ != nullptr) (void)vramp_free_on_own_stream(allocator_, address_);
    }
    void *get() const { return address_; }

private:
    vramp_allocator_t allocator_;
    void *address_ = nullptr;
};

class Allocator {
public:
    explicit Allocator(const char *device, const char *options = nullptr) {
        check(vramp_check_version(VRAMP_VERSION));
        check(vramp_open(device, options, &handle_));
    }
    Allocator(const Allocator &) = delete;
    Allocator &operator=(const Allocator &) = delete;
    ~Allocator() { (void)vramp_close(handle_); }

    vramp_stream_t stream() {
        vramp_stream_t stream;
        check(vramp_stream_create(handle_, &stream));
        return stream;
    }
    Block malloc(std::size_t size, vramp_stream_t stream) { return Block(handle_, size, stream); }
    vramp_stats_t stats() const {
        vramp_stats_t stats = vramp_stats_t();
        stats.struct_size = sizeof stats;
        check(vramp_stats(handle_, &stats));
        return stats;
    }

private:
    vramp_allocator_t handle_ = vramp_allocator_t();
};

int main(int count, char **arguments) try {
    const std::size_t mib = std::size_t(1) << 20;
    Allocator allocator(count > 1 ? arguments[1] : "auto", "limit=1GiB");
    const vramp_stream_t stream = allocator.stream();
    {
        std::vector<Block> blocks;
        for (int i = 0; i < 8; i++) blocks.push_back(allocator.malloc(64 * mib, stream));
        try {
            allocator.malloc(600 * mib, stream);
            std::fprintf(stderr, "512 MiB and 600 MiB fit into 1 GiB\n");
            return 1;
        } catch (const std::bad_alloc &) {
            std::printf("out of memory, as it should be: %.60s...\n", vramp_last_error());
        }
    }
    // All blocks are free: the pieces are remapped to one range.
    const Block large = allocator.malloc(1000 * mib, stream);
    const vramp_stats_t stats = allocator.stats();
    std::printf("1000 MiB at %p, %llu MiB reserved\n", large.get(),
                static_cast<unsigned long long>(stats.reserved / mib));
    return stats.live == 1000 * mib ? 0 : 1;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
