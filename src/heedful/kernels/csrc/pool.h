// A pool of threads for regions of parallel work. Owns the threads and how they wait: they spin for some tens of
// microseconds, then sleep until woken; they never yield (a yield in a spin loop costs 20-40 times when a third process
// is busy). Knows nothing of what runs in a region.
//
// The calling thread is thread 0. A region's body runs once on every thread and must not throw (an exception ends the
// process) nor start a region itself. Two threads may share a pool: their regions run one after the other.
// After a fork the child's copy of a pool starts threads of its own at its first region; those of the parent are not
// there. Fork between regions, or while no other thread is in one.
#pragma once

#include <memory>
#include <type_traits>

namespace heedful {

// Memory that a thread will read soon: while it waits it brings that nearer, line by line, as far as it gets.
struct Ahead {
    const char *next = nullptr, *end = nullptr;
    bool fetch_line();  // false: nothing is left
};

class Pool {
  public:
    // `pinned`: thread i > 0 stays on the i-th processor that this process may use. Throws std::system_error when the
    // system gives no more threads.
    explicit Pool(int threads, bool pinned = false);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // body(int thread) on threads 0..threads()-1; returns when all are done. What they wrote is then visible here.
    template <class Body>
    void run(Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        run_erased([](const void* context, int thread) noexcept {
            (*static_cast<Plain*>(const_cast<void*>(context)))(thread);
        }, &body);
    }

    // In a region: returns when every thread of it has called this. What each wrote before is then visible to all.
    void barrier(Ahead* ahead = nullptr);

  private:
    struct Shared;
    using Erased = void (*)(const void* context, int thread) noexcept;

    void run_erased(Erased body, const void* context);
    void start();
    static void work(Shared* shared, int thread);

    int threads_;
    bool pinned_;
    std::unique_ptr<Shared> shared_;
};

}  // namespace heedful
