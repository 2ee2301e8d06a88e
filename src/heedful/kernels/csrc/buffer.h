// Memory of arrays and of a step's intermediate results.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace heedful {

constexpr size_t kHugePage = size_t(2) << 20;

// For std::free; in huge pages, where it is that much and the system gives them: products walk down columns of wide rows,
// and would miss the address cache at every one.
inline void* allocate(size_t bytes) {
    const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    const size_t whole = (bytes + alignment - 1) / alignment * alignment;
    void* memory = std::aligned_alloc(alignment, whole == 0 ? alignment : whole);
    if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == kHugePage) madvise(memory, whole, MADV_HUGEPAGE);
#endif
    return memory;
}

// 64-byte aligned memory that only grows; contents are lost when it does.
template <typename T>
class Buffer {
public:
    Buffer() = default;
    Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    ~Buffer() { std::free(data_); }
    T* get() const { return data_; }
    T* reserve(size_t count) {
        if (count <= count_) return data_;
        std::free(data_);
        data_ = nullptr;
        count_ = 0;
        data_ = static_cast<T*>(allocate(count * sizeof(T)));
        count_ = count;
        return data_;
    }

private:
    T* data_ = nullptr;
    size_t count_ = 0;
};

}  // namespace heedful
