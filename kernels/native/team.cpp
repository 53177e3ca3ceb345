// The threads that share kernels: see team.h.
#include "team.h"

#include <torch/library.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace infer {
namespace {

// How long a thread that waits asks again and again before it sleeps. This is longer than the time between two kernels
// of a pass, so the next kernel need not wake it. And it is short beside the milliseconds for which the operating system
// gives a program a core: a thread that asks keeps the core from others.
constexpr std::chrono::microseconds kPatience{200};

thread_local bool within_a_kernel = false;

at::DimVector cores;  // that the team's threads may use; none: those of the thread that starts them

// Lets the calling thread run on all of `cores`.
void leave_its_core() {
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int64_t core : cores)
    if (core < CPU_SETSIZE) CPU_SET(core, &set);
  if (!cores.empty()) pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
#endif
}

// Tells the processor that this thread only waits.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Asks until `found()`, but no longer than a thread's patience. Returns the answer.
template <typename Found>
bool spin(const Found& found) {
  constexpr int kAsks = 32;  // before the clock is read
  const auto end = std::chrono::steady_clock::now() + kPatience;
  do {
    for (int i = 0; i < kAsks; ++i) {
      if (found()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

struct alignas(64) Part {  // a cache line each
  std::atomic<int64_t> next{0};
  int64_t end = 0;

  // Takes a quarter of the tasks that are left, but at least `grain`. So the last are few, and all threads end at about
  // the same time. Two neighbours stay together, since they may be the halves of a panel. Returns the first task and the
  // one behind the last, or twice the same.
  std::pair<int64_t, int64_t> take(int64_t grain) {
    int64_t begin = next, behind;
    do {
      behind = std::min(end, (begin + std::max(grain, (end - begin) / 4) + 1) / 2 * 2);
    } while (!next.compare_exchange_weak(begin, behind));
    return {begin, behind};
  }
};

// The threads of this process. They end with it.
class Team {
 public:
  void compute(const Work& work, int64_t threads) {
    std::unique_lock lock(busy_, std::try_to_lock);
    if (!lock) return work.call(work.function, 0, work.count);
    open(work, start(threads));
    take_tasks(0);
    ++job_;
    while (const int32_t working = working_)
      if (!spin([&] { return working_ == 0; })) working_.wait(working);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  // Wakes or starts threads, so that there are so many with the caller. Returns their number: a container may allow fewer.
  int32_t start(int64_t threads) {
    try {
      while (int64_t(parts_.size()) < threads) {
        const auto own = int32_t(parts_.size());
        if (own > 0) std::thread(&Team::serve, this, own).detach();
        parts_.emplace_back();
      }
    } catch (const std::system_error&) {  // fewer will do
    }
    const auto found = int32_t(std::min<int64_t>(threads, parts_.size()));
    if (awake_.exchange(found) < found) awake_.notify_all();
    return found;
  }

  void open(const Work& work, int64_t threads) {
    work_ = work;
    work_.parts = std::min(work.parts, threads);
    for (int64_t i = 0; i < work_.parts; ++i) {
      parts_[i].next = work.count * i / work_.parts;
      parts_[i].end = work.count * (i + 1) / work_.parts;
    }
    ++job_;
    job_.notify_all();
  }

  void take_tasks(int64_t own) {
    within_a_kernel = true;
    try {
      for (int64_t i = 0; i < work_.parts; ++i)
        for (;;) {
          const auto [begin, end] = parts_[(own + i) % work_.parts].take(work_.grain);
          if (begin == end) break;
          work_.call(work_.function, begin, end);
        }
    } catch (...) {
      std::lock_guard lock(error_mutex_);
      error_ = std::current_exception();
    }
    within_a_kernel = false;
  }

  // What a thread of the team runs. A job is open while its number is odd. The caller waits for a thread that has counted
  // itself as working and then finds the job still open.
  void serve(int32_t own) {
    leave_its_core();
    for (uint32_t seen = 0;;) {
      for (int32_t awake; own >= (awake = awake_);) awake_.wait(awake);
      uint32_t job;
      while (!spin([&] { return (job = job_) % 2 == 1 && job != seen; })) job_.wait(job);
      ++working_;
      if (job_ == job && own < work_.parts) take_tasks(own);
      if (--working_ == 0) working_.notify_all();
      seen = job;
    }
  }

  std::mutex busy_;         // held by the thread whose kernel has the team
  std::deque<Part> parts_;  // one for each thread that there is, the first for the caller; they never move
  Work work_{};
  // Threads that wait read these again and again, so each has a cache line.
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int32_t> working_{0};
  alignas(64) std::atomic<int32_t> awake_{1};  // threads with the caller; others of the team sleep
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

Team* team = new Team;  // never freed: at the end of a process its threads may still run

// A forked process has none of these threads.
const int kForked = pthread_atfork(nullptr, nullptr, [] { team = new Team; });

}  // namespace

void divide(const Work& work, int64_t threads) { team->compute(work, threads); }

int64_t threads_here() { return within_a_kernel ? 1 : at::get_num_threads(); }

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.def("use_cores(int[] cores) -> ()", [](at::IntArrayRef given) { cores = given; });
}

}  // namespace infer
