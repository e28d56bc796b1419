// Two processes share a block, with types that end what they hold and errors as exceptions. The parent
// starts itself as its child and sends a ticket through a pipe.
#include <vramp.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

static void check(vramp_status_t status) {
    if (status == VRAMP_OK) return;
    throw std::runtime_error(std::string(vramp_status_name(status)) + ": " + vramp_last_error());
}

static void expect(bool is_true, const char *what) {
    if (!is_true) throw std::runtime_error(std::string("not so: ") + what);
}

class Allocator {
public:
    Allocator() {
        check(vramp_map_simulated_cards());  // a GPU does not need it
        check(vramp_open("auto", nullptr, &handle_));
    }
    Allocator(const Allocator &) = delete;
    Allocator &operator=(const Allocator &) = delete;
    ~Allocator() { (void)vramp_close(handle_); }

    bool is_simulated() const {
        vramp_device_t device = vramp_device_t();
        device.struct_size = sizeof device;
        check(vramp_device(handle_, &device));
        return device.simulated != 0;
    }
    vramp_allocator_t handle() const { return handle_; }

private:
    vramp_allocator_t handle_;
};

// A block that other processes may open, until this ends.
class Export {
public:
    Export(const Allocator &allocator, void *block) : allocator_(allocator.handle()) {
        check(vramp_export(allocator_, block, &handle_));
    }
    Export(const Export &) = delete;
    Export &operator=(const Export &) = delete;
    ~Export() { (void)vramp_export_close(allocator_, handle_); }

    // Keeps the memory until it was opened.
    vramp_ticket_t ticket() const {
        vramp_ticket_t ticket;
        check(vramp_export_ticket(allocator_, handle_, 1, &ticket));
        return ticket;
    }
    bool wait_released(unsigned milliseconds) const {
        int released = 0;
        check(vramp_export_wait(allocator_, handle_, milliseconds, &released));
        return released != 0;
    }

private:
    vramp_allocator_t allocator_;
    vramp_export_t handle_;
};

// Memory of another process.
class Import {
public:
    Import(const Allocator &allocator, const vramp_ticket_t &ticket)
        : allocator_(allocator.handle()) {
        check(vramp_import(allocator_, &ticket, &address_, &size_));
    }
    Import(const Import &) = delete;
    Import &operator=(const Import &) = delete;
    ~Import() { (void)vramp_import_close(allocator_, address_); }

    void *get() const { return address_; }
    std::size_t size() const { return size_; }

private:
    vramp_allocator_t allocator_;
    void *address_ = nullptr;
    std::size_t size_ = 0;
};

static void child() {
    vramp_ticket_t ticket;
    expect(std::fread(&ticket, sizeof ticket, 1, stdin) == 1, "a ticket arrives");
    Allocator allocator;
    Import memory(allocator, ticket);
    if (!allocator.is_simulated()) return;
    char *text = static_cast<char *>(memory.get());
    expect(std::strcmp(text, "from the parent") == 0, "the parent's bytes are here");
    std::strcpy(text, "from the child");
}

static void parent() {
    int ends[2], status = 0;
    expect(pipe(ends) == 0, "a pipe can be made");
    const pid_t pid = fork();
    expect(pid >= 0, "a process can be started");
    if (pid == 0) {
        dup2(ends[0], 0);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "share", "child", static_cast<char *>(nullptr));
        _exit(127);
    }
    close(ends[0]);
    Allocator allocator;
    vramp_stream_t stream;
    void *block = nullptr;
    check(vramp_stream_create(allocator.handle(), &stream));
    check(vramp_malloc(allocator.handle(), std::size_t(64) << 20, stream, &block));
    char *text = static_cast<char *>(block);
    if (allocator.is_simulated()) std::strcpy(text, "from the parent");
    Export exported(allocator, block);
    // Takes effect when the export has ended and the child has closed it.
    check(vramp_free(allocator.handle(), block, stream));
    const vramp_ticket_t ticket = exported.ticket();
    expect(write(ends[1], &ticket, sizeof ticket) == ssize_t(sizeof ticket), "it can be sent");
    close(ends[1]);
    expect(waitpid(pid, &status, 0) == pid && status == 0, "the child ends well");
    expect(exported.wait_released(10000), "the child has closed it");
    if (allocator.is_simulated())
        expect(std::strcmp(text, "from the child") == 0, "the child's bytes are here");
}

int main(int count, char **arguments) {
    try {
        if (count == 2 && std::string(arguments[1]) == "child") {
            child();
        } else {
            parent();
            std::puts("passed");
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
