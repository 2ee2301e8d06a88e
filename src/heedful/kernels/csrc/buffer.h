// Memory of a step's intermediate results.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace heedful {

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
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
        if (!data_) throw std::bad_alloc();
        count_ = count;
        return data_;
    }

private:
    T* data_ = nullptr;
    size_t count_ = 0;
};

}  // namespace heedful
