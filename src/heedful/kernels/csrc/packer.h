// Packs matrices on threads of its own, while the caller goes on. Those of one packer lie together in few large pieces of
// memory, since matrices of half a megabyte each would get no huge pages of their own (SmolLM2: 24,000 page faults at a
// start, and misses of the address cache in every step). A piece lives as long as one of its matrices.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ops.h"

namespace heedful {

class Packer {
  public:
    explicit Packer(int threads);
    ~Packer();  // what is not packed by then never will be
    Packer(const Packer&) = delete;
    Packer& operator=(const Packer&) = delete;

    // As pack() does with all panels. They may be read, and `stored` may go, after finish().
    std::shared_ptr<uint8_t> start(int ggml_type, const uint8_t* stored, Format format, int rows, int cols);
    void finish();

  private:
    struct Job {
        int ggml_type;
        const uint8_t* stored;
        Format format;
        int rows, cols;
        uint8_t* panels;
        int next_panel, panels_at_once;
    };

    std::shared_ptr<uint8_t> take(size_t bytes);
    void work();

    std::shared_ptr<uint8_t> piece_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;

    std::mutex mutex_;  // of all below
    std::condition_variable more_, done_;
    std::deque<Job> jobs_;
    int busy_ = 0;
    bool ends_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace heedful
