// Records the operators of a forward pass and plays them without Python: see tape.py.
//
// A recorded pass can be played with inputs of any size, as long as no operator's arguments name a size. Playing only
// passes the results of one operator to the next:
//
//   slots      [ input 0 | input 1 | … | result | result | … ]
//   calls      embedding(constant, slot 0) -> slot 6;  fused_add_rms_norm(slot 6, …) -> slots 7, 8;  …
//
// All other arguments are constants: weights, the KV store, numbers.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

extern "C" void omp_set_num_threads(int);  // of the OpenMP library that torch has loaded

namespace infer {
namespace {

using Slots = std::vector<int64_t>;

// One argument: a constant, or a tensor from a slot, or a list of those.
struct Argument {
  c10::IValue constant;
  Slots slots;
  enum { kConstant, kTensor, kList } kind;
};

struct Call {
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  std::vector<Slots> results;  // of each return value: one slot, or a list's
  Slots last_used;             // slots not needed after this call: their memory is freed
};

struct Tape : torch::CustomClassHolder {
  explicit Tape(int64_t inputs) : inputs_(inputs), slots_(inputs) {}

  // ---- recording

  void begin(const std::string& name, const std::string& overload) {
    calls_.push_back({c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}, {}, {}});
  }
  void add_constant(const c10::IValue& value) { arguments().push_back({value, {}, Argument::kConstant}); }
  void add_default() { add_constant(*schema_argument().default_value()); }
  // An empty Python list has no element type; the operator's schema has it.
  void add_empty_list() {
    auto type = schema_argument().type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    add_constant(c10::impl::GenericList(type->expectRef<c10::ListType>().getElementType()));
  }
  void add_tensor(int64_t slot) { arguments().push_back({{}, {slot}, Argument::kTensor}); }
  void add_list(Slots slots) { arguments().push_back({{}, std::move(slots), Argument::kList}); }
  int64_t new_slot() {
    slots_.emplace_back();
    return int64_t(slots_.size()) - 1;
  }
  // A slot for a tensor that stands in a list: a list's tensors all come from slots.
  int64_t hold(const at::Tensor& tensor) {
    slots_.push_back(tensor);
    held_.push_back(int64_t(slots_.size()) - 1);
    return held_.back();
  }
  void end(std::vector<Slots> results) { calls_.back().results = std::move(results); }

  // Completes the tape. `outputs` are the slots of the pass's results.
  void finish(Slots outputs) {
    outputs_ = std::move(outputs);
    std::vector<bool> needed(slots_.size(), false);
    for (int64_t slot : outputs_) needed[slot] = true;
    for (int64_t slot : held_) needed[slot] = true;
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
      const auto last_use = [&](const Slots& slots) {
        for (int64_t slot : slots)
          if (!needed[slot]) {
            needed[slot] = true;
            call->last_used.push_back(slot);
          }
      };
      for (const auto& argument : call->arguments) last_use(argument.slots);
      for (const auto& slots : call->results) last_use(slots);
    }
  }

  int64_t size() const { return int64_t(calls_.size()); }

  // ---- playing

  std::vector<at::Tensor> play(const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(int64_t(inputs.size()) == inputs_, "a tape of ", inputs_, " inputs was given ", inputs.size());
    c10::InferenceMode inference;
    // If an operator raises, the tape frees the pass's tensors: memory may be what is missing.
    struct LetGo {
      Tape& tape;
      ~LetGo() { tape.let_go(); }
    } let_go{*this};
    for (int64_t slot = 0; slot < inputs_; ++slot) slots_[slot] = inputs[slot];
    torch::jit::Stack stack;
    for (const auto& call : calls_) {
      stack.clear();
      for (const auto& argument : call.arguments) push(stack, argument);
      call.op.callBoxed(&stack);
      for (size_t i = 0; i < call.results.size(); ++i) keep(std::move(stack[i]), call.results[i]);
      for (int64_t slot : call.last_used) slots_[slot] = at::Tensor();
    }
    std::vector<at::Tensor> outputs;
    for (int64_t slot : outputs_) outputs.push_back(std::exchange(slots_[slot], at::Tensor()));
    return outputs;
  }

 private:
  std::vector<Argument>& arguments() { return calls_.back().arguments; }
  const c10::Argument& schema_argument() { return calls_.back().op.schema().arguments().at(arguments().size()); }

  void push(torch::jit::Stack& stack, const Argument& argument) const {
    if (argument.kind == Argument::kConstant) {
      stack.push_back(argument.constant);
    } else if (argument.kind == Argument::kTensor) {
      stack.emplace_back(slots_[argument.slots[0]]);
    } else {
      c10::List<at::Tensor> tensors;
      for (int64_t slot : argument.slots) tensors.push_back(slots_[slot]);
      stack.emplace_back(std::move(tensors));
    }
  }

  // Empties all slots but those of tensors that are part of the tape.
  void let_go() {
    std::vector<at::Tensor> kept(slots_.size());
    for (int64_t slot : held_) kept[slot] = std::move(slots_[slot]);
    slots_ = std::move(kept);
  }

  void keep(c10::IValue result, const Slots& slots) {
    if (result.isTensor()) {
      slots_[slots[0]] = std::move(result).toTensor();
      return;
    }
    const auto tensors = result.toTensorVector();
    for (size_t i = 0; i < slots.size(); ++i) slots_[slots[i]] = tensors[i];
  }

  int64_t inputs_;
  std::vector<Call> calls_;
  std::vector<at::Tensor> slots_;
  Slots held_, outputs_;
};

// A thread that plays tapes in the order of submission. It is not a Python thread and never waits for the interpreter's
// lock, so a pass goes on while Python runs.
struct Player {
  Player() : thread_([this] { run(); }) {}

  ~Player() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // Submits a pass and returns its ticket. `after`, if not 0, is the ticket of an earlier pass: its outputs become this
  // pass's first inputs, and its error becomes this pass's error. The caller does not wait for it. So many `threads`
  // share the pass.
  int64_t submit(const c10::intrusive_ptr<Tape>& tape, std::vector<at::Tensor> inputs, int64_t after, int64_t threads) {
    std::lock_guard lock(mutex_);
    TORCH_CHECK(after <= submitted_, "nothing was handed in under ", after);
    jobs_.push_back({++submitted_, after, threads, tape, std::move(inputs)});
    changed_.notify_all();
    return submitted_;
  }

  // Blocks until a pass is done. Returns its outputs, or throws its error. Call it once for each pass.
  std::vector<at::Tensor> wait(int64_t ticket) {
    std::unique_lock lock(mutex_);
    TORCH_CHECK(ticket > 0 && ticket <= submitted_, "nothing was handed in under ", ticket);
    TORCH_CHECK(ticket > completed_ || done_.count(ticket), ticket, " was waited for already");
    changed_.wait(lock, [&] { return done_.count(ticket) != 0; });
    auto done = std::move(done_.extract(ticket).mapped());
    if (done.error) std::rethrow_exception(done.error);
    return std::move(done.outputs);
  }

  // Returns when the passes since the last call began and ended: [passes, 3] float64, ticket and seconds on the steady
  // clock. At most the latest thousand.
  at::Tensor take_times() {
    std::lock_guard lock(mutex_);
    auto times = at::empty({int64_t(times_.size()), 3}, at::kDouble);
    for (size_t i = 0; i < times_.size(); ++i)
      for (int64_t j = 0; j < 3; ++j) times.data_ptr<double>()[3 * i + j] = times_[i][j];
    times_.clear();
    return times;
  }

  // Blocks until all submitted passes are done.
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return completed_ == submitted_; });
  }

  // Returns whether a pass is done, waiting at most so many seconds for it.
  bool is_done(int64_t ticket, double within_s) {
    std::unique_lock lock(mutex_);
    const std::chrono::duration<double> patience(within_s);
    return changed_.wait_for(lock, patience, [&] { return done_.count(ticket) != 0; });
  }

 private:
  struct Job {
    int64_t ticket, after, threads;
    c10::intrusive_ptr<Tape> tape;
    std::vector<at::Tensor> inputs;
  };
  struct Done {
    std::vector<at::Tensor> outputs;
    std::exception_ptr error;
    // Freed by the thread that waits, or that ends the player. Freeing a Python tensor takes the interpreter's
    // lock, which a Python thread holds while it joins this one.
    std::vector<at::Tensor> inputs;
    std::vector<c10::intrusive_ptr<Tape>> tapes;
  };

  static double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void run() {
    at::get_num_threads();  // once in each thread this sets the number itself, so it comes before the first pass
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      Done before;
      omp_set_num_threads(int(job.threads));
      if (job.after) before = std::move(done_.extract(job.after).mapped());
      lock.unlock();
      Done done = std::move(before);
      const double began = seconds();
      if (!done.error) try {
          auto inputs = done.outputs;
          inputs.insert(inputs.end(), job.inputs.begin(), job.inputs.end());
          done.outputs = job.tape->play(inputs);
        } catch (...) {
          done.error = std::current_exception();
        }
      done.inputs.insert(done.inputs.end(), job.inputs.begin(), job.inputs.end());
      job.inputs.clear();  // none of these was the last reference
      done.tapes.push_back(std::move(job.tape));
      lock.lock();
      done_[job.ticket] = std::move(done);
      completed_ = job.ticket;
      times_.push_back({double(job.ticket), began, seconds()});
      if (times_.size() > 1000) times_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::map<int64_t, Done> done_;
  std::deque<std::array<double, 3>> times_;
  int64_t submitted_ = 0, completed_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // the last member: it uses the others
};

// A `Player` that a forked process has anew: `fork` copies the state of the parent's thread, but not the thread.
// Passes that were not waited for when the process was forked are unknown to the new one.
struct TapePlayer : torch::CustomClassHolder {
  ~TapePlayer() override {
    if (is_copy()) player_.release();  // its thread cannot be joined
  }

  Player& here() {
    if (is_copy()) {
      player_.release();
      player_ = std::make_unique<Player>();
      process_ = getpid();
    }
    return *player_;
  }

 private:
  bool is_copy() const { return getpid() != process_; }

  std::unique_ptr<Player> player_ = std::make_unique<Player>();
  pid_t process_ = getpid();
};

using PlayerPointer = c10::intrusive_ptr<TapePlayer>;
using TapePointer = c10::intrusive_ptr<Tape>;

// Sets the number of threads that share the calling thread's operators, and returns the number before.
int64_t set_threads_here(int64_t threads) {
  const int64_t before = at::get_num_threads();  // once in each thread this sets the number itself
  omp_set_num_threads(int(threads));
  return before;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(infer, library) {
  library.class_<Tape>("Tape")
      .def(torch::init<int64_t>())
      .def("begin", &Tape::begin)
      .def("add_constant", [](const c10::intrusive_ptr<Tape>& tape, c10::IValue value) { tape->add_constant(value); })
      .def("add_default", &Tape::add_default)
      .def("add_empty_list", &Tape::add_empty_list)
      .def("add_tensor", &Tape::add_tensor)
      .def("add_list", &Tape::add_list)
      .def("new_slot", &Tape::new_slot)
      .def("hold", &Tape::hold)
      .def("end", &Tape::end)
      .def("finish", &Tape::finish)
      .def("size", &Tape::size)
      .def("play", &Tape::play);
  library.def("set_threads_here(int threads) -> int", &set_threads_here);
  library.class_<TapePlayer>("TapePlayer")
      .def(torch::init<>())
      .def("submit", [](const PlayerPointer& player, const TapePointer& tape, std::vector<at::Tensor> inputs,
                        int64_t after, int64_t threads) {
        return player->here().submit(tape, std::move(inputs), after, threads);
      })
      .def("wait", [](const PlayerPointer& player, int64_t ticket) { return player->here().wait(ticket); })
      .def("drain", [](const PlayerPointer& player) { player->here().drain(); })
      .def("take_times", [](const PlayerPointer& player) { return player->here().take_times(); })
      .def("is_done", [](const PlayerPointer& player, int64_t ticket, double within_s) {
        return player->here().is_done(ticket, within_s);
      });
}

}  // namespace infer
