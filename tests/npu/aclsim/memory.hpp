// Which addresses are whose: a device's, page-locked by the runtime, or registered with it.

#pragma once

#include <acl/acl_rt.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>

// Codes of the real runtime (acl/error_codes).
constexpr aclError kOk = 0;
constexpr aclError kInvalidParameter = 107000;
constexpr aclError kInvalidDevice = 107001;
constexpr aclError kNoContext = 107002;
constexpr aclError kOutOfMemory = 207001;
constexpr aclError kDeviceFailed = 507899;

constexpr size_t kPageBytes = 4096;
constexpr size_t kDeviceBytes = size_t{64} << 30;

enum class Kind { device, page_locked, registered };

struct Range {
  size_t nbytes;
  Kind kind;
  int device;
};

// Which addresses are whose. Never destroyed: threads of streams outlive main().
class Memory {
 public:
  static Memory &get() {
    static auto *one = new Memory;
    return *one;
  }

  aclError allocate(void **address, size_t nbytes, Kind kind, int device) {
    size_t room = (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    *address = std::aligned_alloc(kPageBytes, room == 0 ? kPageBytes : room);
    if (*address == nullptr) return kOutOfMemory;
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[start_of(*address)] = {room, kind, device};
    if (kind == Kind::device) used_ += room;
    return kOk;
  }

  aclError free(void *address, bool is_device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ranges_.find(start_of(address));
    Kind kind = is_device ? Kind::device : Kind::page_locked;
    if (found == ranges_.end() || found->second.kind != kind) return kInvalidParameter;
    if (is_device) used_ -= found->second.nbytes;
    ranges_.erase(found);
    std::free(address);
    return kOk;
  }

  aclError enlist(void *address, size_t nbytes, int device) {
    if (nbytes == 0 || start_of(address) % kPageBytes != 0) return kInvalidParameter;
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.upper_bound(start_of(address));
    if (next != ranges_.end() && next->first < start_of(address) + nbytes) return kDeviceFailed;
    if (find(start_of(address)) != nullptr) return kDeviceFailed;
    ranges_[start_of(address)] = {nbytes, Kind::registered, device};
    return kOk;
  }

  aclError strike(void *address) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ranges_.find(start_of(address));
    if (found == ranges_.end() || found->second.kind != Kind::registered) return kInvalidParameter;
    ranges_.erase(found);
    return kOk;
  }

  // False: memory that the runtime does not know.
  bool look_up(const void *address, size_t nbytes, Range *range) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto *found = find(start_of(address));
    if (found == nullptr) return false;
    if (start_of(address) + nbytes > found->first + found->second.nbytes) return false;
    *range = found->second;
    return true;
  }

  size_t used() {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_;
  }

 private:
  static uintptr_t start_of(const void *address) { return reinterpret_cast<uintptr_t>(address); }

  const std::pair<const uintptr_t, Range> *find(uintptr_t address) {
    auto after = ranges_.upper_bound(address);
    if (after == ranges_.begin()) return nullptr;
    const auto &range = *std::prev(after);
    return address < range.first + range.second.nbytes ? &range : nullptr;
  }

  std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;
  size_t used_ = 0;
};
