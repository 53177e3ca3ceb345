// Divides a kernel's work among threads, and never waits for one that has not begun.
//
// The work is a number of tasks, which are cut into parts, one for each thread. A thread takes some tasks of its own part
// at a time, and then those that are left of other parts:
//
//   part 0  [ done        | done  | thread 0 |   |   ]        part 1  [ done        | thread 1 |   |   |   ]
//
// A thread may be late: it sleeps, or another program has its core. Then the others compute its part. With OpenMP, the
// end of every kernel waits for all threads. A decode step has some two hundred kernels, so beside a single busy program
// it waited two hundred times until the operating system gave a core back.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace infer {

// Tasks 0 to `count` in so many parts: call(function, begin, end) computes some of them, `grain` at least but for the last
// of a part.
struct Work {
  void (*call)(const void* function, int64_t begin, int64_t end);
  const void* function;
  int64_t count, grain, parts;
};

// Computes all tasks in one thread for each part: the calling one and others, or that one alone while another kernel has
// the others. So many `threads`, the calling one included, stay awake for the next kernel. Throws what a task threw.
void divide(const Work& work, int64_t threads);

// Returns the number of threads for a kernel that the calling thread computes: one within `parallel_for`.
int64_t threads_here();

// Calls function(begin, end), in several threads at once, for ranges that make up the tasks 0 to `count`.
template <typename Function>
void parallel_for(int64_t count, int64_t grain, const Function& function) {
  if (count <= 0) return;
  const int64_t threads = threads_here(), parts = std::min(threads, at::divup(count, grain));
  if (parts == 1) return function(int64_t(0), count);
  const auto call = [](const void* function, int64_t begin, int64_t end) {
    (*static_cast<const Function*>(function))(begin, end);
  };
  divide({call, &function, count, grain, parts}, threads);
}

}  // namespace infer
