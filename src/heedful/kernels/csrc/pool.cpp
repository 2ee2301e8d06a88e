// Waiting is on one word of memory: spin while it keeps its value, then sleep on it (futex; elsewhere a condition
// variable).
//
// Measured, 2 threads on 2 cores (Zen 4 VM): hot, an empty region 0.18 us and a barrier 0.03 us on a quiet machine (0.8
// and 0.3 on a busier day); a region after 1 ms of rest 14-56 us, which is what waking a sleeper costs here.
// 120 barriers with 6 us of work between them, a third process busy on one of the cores: always spinning 50 us 15 ms;
// giving up after 3 us where a spin was in vain 2.0-4.5 ms; after 1 us 1.9 ms; one thread alone would take 1.5.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace heedful {
namespace {

// Waking a sleeper costs about as much as the long spin. Where a spin was in vain, two threads probably share a
// processor with each other or with a busy process, and spinning keeps away the one that is waited for: so the next
// waits give up soon, and only every 16th tries the long spin again.
constexpr std::chrono::microseconds kLongSpin{50}, kShortSpin{1};
constexpr int kShortSpins = 15;

void pause_briefly() {
#if defined(__x86_64__) || defined(_M_X64)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");  // the instruction, a hint to the core: not the system call
#endif
}

}  // namespace

bool Ahead::fetch_line() {
    if (next >= end) return false;
    __builtin_prefetch(next, 0, 2);  // into the second cache level
    next += 64;
    return true;
}

namespace {

// A counter that one thread publishes and others wait on.
class Signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    // Only one thread at a time publishes.
    void publish(uint32_t value) {
        value_.store(value, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all();
    }

    // Returns once the value is no longer `old`.
    void wait_past(uint32_t old, Ahead* ahead = nullptr) {
        if (spin_past(old, ahead)) return;
        // Announced before the last look: either that sees the new value, or publish() sees the sleeper.
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (value_.load(std::memory_order_seq_cst) == old) sleep_on(old);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
    bool spin_past(uint32_t old, Ahead* ahead) {
        const int short_spins = short_spins_.load(std::memory_order_relaxed);
        const bool passed = spin_past(old, ahead, short_spins > 0 ? kShortSpin : kLongSpin);
        const int left = passed ? 0 : short_spins > 0 ? short_spins - 1 : kShortSpins;
        if (left != short_spins) short_spins_.store(left, std::memory_order_relaxed);  // a lost update is harmless
        return passed;
    }

    bool spin_past(uint32_t old, Ahead* ahead, std::chrono::microseconds limit) const {
        if (value() != old) return true;
        const auto until = std::chrono::steady_clock::now() + limit;
        do {
            for (int i = 0; i < 32; i++) {
                if (value() != old) return true;
                if (ahead == nullptr || !ahead->fetch_line()) pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < until);
        return false;
    }

#if defined(__linux__)
    void sleep_on(uint32_t old) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0); }
    void wake_all() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep_on(uint32_t old) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != old; });
    }
    void wake_all() {
        { std::lock_guard<std::mutex> lock(mutex_); }  // a sleeper is either before its look or in wait()
        changed_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable changed_;
#endif

    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<int> short_spins_{0};  // that are still to come before a long one
};

// Threads that meet: the last to arrive lets the others go on.
class Meeting {
  public:
    void join(uint32_t count, Ahead* ahead = nullptr) {
        const uint32_t round = passed_.value();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < count) return passed_.wait_past(round, ahead);
        arrived_.store(0, std::memory_order_relaxed);  // before anybody can arrive anew
        passed_.publish(round + 1);
    }

  private:
    alignas(64) std::atomic<uint32_t> arrived_{0};
    Signal passed_;
};

// Misuse would deadlock or corrupt memory, so it ends the process in every build.
void require(bool holds, const char* what, int value) {
    if (holds) return;
    std::fprintf(stderr, "heedful: %s (%d)\n", what, value);
    std::abort();
}

// How many forks lie between the first process and this one.
std::atomic<uint32_t> forks{0};

void count_forks() {
#if !defined(_WIN32)
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    require(registered == 0, "pthread_atfork failed", registered);
#endif
}

void pin_to(int index) {
#if defined(__linux__)
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int skip = index % CPU_COUNT(&allowed), cpu = 0;
    while (!CPU_ISSET(cpu, &allowed) || skip-- > 0) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);  // refused: the thread runs unpinned, which is only slower
#else
    (void)index;
#endif
}

}  // namespace

// What the threads share. Never moves, and is left behind whole in a forked child.
struct Pool::Shared {
    int threads;
    uint32_t born = forks.load();
    std::mutex regions;       // held while a region runs
    Signal started;           // counts regions
    Meeting barriers, ended;
    Erased body = nullptr;    // null: the workers end
    const void* context = nullptr;
    std::vector<std::thread> workers;

    void begin(Erased new_body, const void* new_context) {
        body = new_body;
        context = new_context;
        started.publish(started.value() + 1);
    }

    void end() {
        begin(nullptr, nullptr);
        for (std::thread& worker : workers) worker.join();
    }
};

namespace {
thread_local const void* region_of = nullptr;  // the Shared of the region that this thread is in
}

Pool::Pool(int threads, bool pinned) : threads_(threads), pinned_(pinned) {
    require(threads >= 1, "a pool needs at least one thread", threads);
    count_forks();
    start();
}

void Pool::start() {
    shared_ = std::make_unique<Shared>();
    shared_->threads = threads_;
    try {
        for (int thread = 1; thread < threads_; thread++) {
            shared_->workers.emplace_back([shared = shared_.get(), thread, pinned = pinned_] {
                if (pinned) pin_to(thread);
                work(shared, thread);
            });
        }
    } catch (const std::system_error&) {  // no more threads to be had: those that run must end before Shared does
        shared_->end();
        throw;
    }
}

Pool::~Pool() {
    if (shared_->born != forks.load()) {
        shared_.release();  // its threads are in another process: nothing to join
        return;
    }
    require(region_of != shared_.get(), "a pool cannot end inside its own region; threads", threads_);
    shared_->end();
}

void Pool::work(Shared* shared, int thread) {
    region_of = shared;
    for (uint32_t region = 0;; region++) {
        shared->started.wait_past(region);
        if (shared->body == nullptr) return;
        shared->body(shared->context, thread);
        shared->ended.join(uint32_t(shared->threads));
    }
}

void Pool::run_erased(Erased body, const void* context) {
    require(region_of == nullptr, "a region cannot start inside a region; threads", threads_);
    if (shared_->born != forks.load()) {
        shared_.release();  // leaked on purpose: its threads and locks are in another process
        start();
    }
    std::lock_guard<std::mutex> lock(shared_->regions);
    region_of = shared_.get();
    if (threads_ > 1) shared_->begin(body, context);
    body(context, 0);
    if (threads_ > 1) shared_->ended.join(uint32_t(threads_));
    region_of = nullptr;
}

void Pool::barrier(Ahead* ahead) {
    require(region_of == shared_.get(), "a barrier outside of a region of its pool; threads", threads_);
    if (threads_ > 1) shared_->barriers.join(uint32_t(threads_), ahead);
}

}  // namespace heedful
