#include "packer.h"

#include <algorithm>
#include <cstdlib>

#include "buffer.h"
#include "pack.h"

namespace heedful {
namespace {

constexpr size_t kPieceBytes = 16 * kHugePage;
constexpr size_t kBytesAtOnce = size_t(1) << 18;  // what a thread takes

int panels_of(int rows) { return (rows + kPanelRows - 1) / kPanelRows; }

}  // namespace

Packer::Packer(int threads) {
    for (int i = 0; i < threads; i++) threads_.emplace_back([this] { work(); });
}

Packer::~Packer() {
    {
        const std::lock_guard lock(mutex_);
        jobs_.clear();
        ends_ = true;
    }
    more_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<uint8_t> Packer::start(int ggml_type, const uint8_t* stored, Format format, int rows, int cols) {
    std::shared_ptr<uint8_t> panels = take(packed_bytes(format, rows, cols));
    if (rows == 0) return panels;
    const int at_once = int(kBytesAtOnce / packed_bytes(format, kPanelRows, cols)) + 1;
    {
        const std::lock_guard lock(mutex_);
        jobs_.push_back({ggml_type, stored, format, rows, cols, panels.get(), 0, at_once});
    }
    more_.notify_all();
    return panels;
}

void Packer::finish() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return jobs_.empty() && busy_ == 0; });
}

std::shared_ptr<uint8_t> Packer::take(size_t bytes) {
    const size_t whole = (bytes + 63) / 64 * 64;
    if (whole > left_) {
        left_ = std::max(whole, kPieceBytes);
        piece_ = {static_cast<uint8_t*>(allocate(left_)), [](uint8_t* piece) { std::free(piece); }};
        next_ = piece_.get();
    }
    left_ -= whole;
    next_ += whole;
    return {piece_, next_ - whole};
}

void Packer::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        more_.wait(lock, [this] { return ends_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        Job& first = jobs_.front();
        const int begin = first.next_panel, end = std::min(begin + first.panels_at_once, panels_of(first.rows));
        first.next_panel = end;
        const Job job = first;
        if (end == panels_of(first.rows)) jobs_.pop_front();
        busy_++;
        lock.unlock();
        pack(job.ggml_type, job.stored, job.format, job.rows, job.cols, begin, end, job.panels);
        lock.lock();
        if (--busy_ == 0 && jobs_.empty()) done_.notify_all();
    }
}

}  // namespace heedful
