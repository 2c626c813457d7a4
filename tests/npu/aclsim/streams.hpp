// Streams, which are threads with queues; events; and the handles that stand for them.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memory.hpp"

using Clock = std::chrono::steady_clock;

class Event {
 public:
  explicit Event(bool is_timed) : is_timed(is_timed) {}

  const bool is_timed;

  uint64_t record() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ++recorded_;
  }

  void pass(uint64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    passed_ = std::max(passed_, ticket);
    passed_at_ = Clock::now();
    changed_.notify_all();
  }

  uint64_t last_ticket() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recorded_;
  }

  bool is_passed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return passed_ >= recorded_;
  }

  void await(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return passed_ >= ticket; });
  }

  Clock::time_point passed_at() {
    std::lock_guard<std::mutex> lock(mutex_);
    return passed_at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0;
  uint64_t passed_ = 0;
  Clock::time_point passed_at_;
};

class Stream {
 public:
  explicit Stream(int device, int32_t id) : device(device), id(id) {
    std::thread([this] { run(); }).detach();
  }

  const int device;
  const int32_t id;

  void launch(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !is_busy_;
  }

  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty() && !is_busy_; });
  }

  void hold(bool is_held) {
    std::lock_guard<std::mutex> lock(mutex_);
    is_held_ = is_held;
    changed_.notify_all();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty() && !is_held_; });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      is_busy_ = true;
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_busy_ = false;
  bool is_held_ = false;
};

// What handles stand for. A destroyed event lives on in the tasks that use it; streams are few and
// stay, since their threads do.
class Handles {
 public:
  static Handles &get() {
    static auto *one = new Handles;
    return *one;
  }

  Stream *add_stream(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(new Stream(device, static_cast<int32_t>(streams_.size())));
    return streams_.back();
  }

  // A null handle is the device's default stream.
  Stream *stream(void *handle, int device) {
    if (handle == nullptr) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = defaults_.find(device);
        if (found != defaults_.end()) return found->second;
      }
      Stream *made = add_stream(device);
      std::lock_guard<std::mutex> lock(mutex_);
      return defaults_.emplace(device, made).first->second;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (Stream *stream : streams_) {
      if (stream == handle) return stream;
    }
    return nullptr;
  }

  std::vector<Stream *> streams_of(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Stream *> found;
    for (Stream *stream : streams_) {
      if (stream->device == device) found.push_back(stream);
    }
    return found;
  }

  void *add_event(bool is_timed) {
    auto event = std::make_shared<Event>(is_timed);
    std::lock_guard<std::mutex> lock(mutex_);
    events_[event.get()] = event;
    return event.get();
  }

  std::shared_ptr<Event> event(void *handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = events_.find(handle);
    return found == events_.end() ? nullptr : found->second;
  }

  aclError destroy_event(void *handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    return events_.erase(handle) == 1 ? kOk : kInvalidParameter;
  }

 private:
  std::mutex mutex_;
  std::vector<Stream *> streams_;
  std::map<int, Stream *> defaults_;
  std::map<void *, std::shared_ptr<Event>> events_;
};
