// A trainer updates weights in place, and an engine takes them between two of its steps. The argument is the directory
// of a keeper: run `vramp keep --directory DIR` before. The parent is the engine, and starts itself as the trainer.
#include <vramp.hpp>

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

static const char NAME[] = "example/policy";
static const uint64_t UPDATES = 20;

static void expect(bool is_true, const char *what) {
    if (!is_true) throw std::runtime_error(std::string("not so: ") + what);
}

class allocator {
public:
    allocator() : handle_() {
        vramp::check(vramp_map_simulated_cards());  // a GPU does not need it
        vramp::check(vramp_open("auto", nullptr, &handle_));
    }
    allocator(const allocator &) = delete;
    allocator &operator=(const allocator &) = delete;
    ~allocator() { (void)vramp_close(handle_); }

    bool is_simulated() const {
        vramp_device_t device = vramp_device_t();
        device.struct_size = sizeof device;
        vramp::check(vramp_device(handle_, &device));
        return device.simulated != 0;
    }
    vramp_allocator_t handle() const { return handle_; }

private:
    vramp_allocator_t handle_;
};

// On a GPU a kernel writes: record its stream before commit_update().
static void trainer(const std::string &directory) {
    allocator card;
    const vramp::keeper keeper(card.handle(), directory);
    const vramp::kept policy(keeper, NAME, vramp::kept_open_options(true, VRAMP_KEPT_UNLOCKED));
    for (uint64_t update = 0; update < UPDATES; ++update) {
        const uint64_t epoch = policy.write() + 1;
        if (card.is_simulated()) std::memcpy(policy.get(), &epoch, sizeof epoch);
        expect(policy.commit_update() == epoch, "it is the next epoch");
    }
}

static void engine(const std::string &directory) {
    allocator card;
    vramp::keeper opened(card.handle(), directory);
    const vramp::keeper keeper(std::move(opened));
    vramp::kept_draft draft(keeper, NAME, vramp::kept_options(1 << 20));
    void *const weights = draft.place(1 << 20);
    expect(draft.state().phase == VRAMP_KEPT_DRAFT, "no other process sees it");
    const vramp::kept policy(std::move(draft), "bytes", std::array<uint8_t, 32>());
    expect(policy.get() == weights && policy.size() >= 1 << 20, "the addresses stay");
    expect(policy.layout() == "bytes" && policy.epoch() == 1, "it is committed");

    const pid_t pid = fork();
    expect(pid >= 0, "a process can be started");
    if (pid == 0) {
        execl("/proc/self/exe", "keep", directory.c_str(), "trainer", static_cast<char *>(nullptr));
        _exit(127);
    }
    uint64_t epoch = policy.epoch();
    while (epoch < 1 + UPDATES) {
        epoch = policy.yield_to_writer();
        // one step with the weights
        uint64_t found = epoch;
        if (card.is_simulated() && epoch > 1) std::memcpy(&found, policy.get(), sizeof found);
        expect(found == epoch, "the weights are those of the epoch");
    }
    int status = 0;
    expect(waitpid(pid, &status, 0) == pid && status == 0, "the trainer ends well");

    const std::vector<vramp_kept_entry_t> entries = keeper.entries();
    expect(entries.size() == 1 && std::string(entries[0].name) == NAME, "it is the only one");
    expect(entries[0].holders == 1 && entries[0].epoch == epoch, "the engine has it open");
    expect(keeper.evict(1 << 30) == 0, "what is open is not evicted");
    keeper.remove(NAME);
    expect(policy.state().superseded == 1, "the engine keeps it");
    try {
        vramp::kept(keeper, NAME);
        expect(false, "the name is free");
    } catch (const vramp::error &error) {
        expect(error.status() == VRAMP_ERROR_NOT_KEPT, "the name is free");
    }
}

int main(int count, char **arguments) {
    try {
        expect(count > 1, "the argument is the directory of a keeper");
        if (count == 3) {
            trainer(arguments[1]);
        } else {
            engine(arguments[1]);
            std::puts("passed");
        }
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
