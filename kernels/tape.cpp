// A forward pass as the list of operators that it calls, played back without Python: see tape.py.
//
// Recorded once, a pass can be played with other inputs of any size, as long as no operator's arguments name a size.
// Between two operators nothing happens but that the results of one become the arguments of the next:
//
//   slots      [ input 0 | input 1 | … | result | result | … ]
//   calls      embedding(constant, slot 0) -> slot 6;  fused_add_rms_norm(slot 6, …) -> slots 7, 8;  …
//
// What is not an input and not a result is a constant: weights, the KV store, numbers.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

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
  Slots last_used;             // slots that nobody needs after this call: their memory is free for the next
};

struct Tape : torch::CustomClassHolder {
  explicit Tape(int64_t inputs) : inputs_(inputs), slots_(inputs) {}

  // ---- recording

  void begin(const std::string& name, const std::string& overload) {
    calls_.push_back({c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()), {}, {}, {}});
  }
  void add_constant(const c10::IValue& value) { arguments().push_back({value, {}, Argument::kConstant}); }
  void add_default() { add_constant(*schema_argument().default_value()); }
  // An empty Python list does not say of what; the operator's schema does.
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

  // The tape is complete, and `output` is what a pass is played for.
  void finish(int64_t output) {
    output_ = output;
    std::vector<bool> needed(slots_.size(), false);
    needed[output] = true;
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

  at::Tensor play(const std::vector<at::Tensor>& inputs) {
    TORCH_CHECK(int64_t(inputs.size()) == inputs_, "a tape of ", inputs_, " inputs was given ", inputs.size());
    c10::InferenceMode inference;
    for (int64_t slot = 0; slot < inputs_; ++slot) slots_[slot] = inputs[slot];
    torch::jit::Stack stack;
    for (const auto& call : calls_) {
      stack.clear();
      for (const auto& argument : call.arguments) push(stack, argument);
      call.op.callBoxed(&stack);
      for (size_t i = 0; i < call.results.size(); ++i) keep(std::move(stack[i]), call.results[i]);
      for (int64_t slot : call.last_used) slots_[slot] = at::Tensor();
    }
    return std::exchange(slots_[output_], at::Tensor());
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

  void keep(c10::IValue result, const Slots& slots) {
    if (result.isTensor()) {
      slots_[slots[0]] = std::move(result).toTensor();
      return;
    }
    const auto tensors = result.toTensorVector();
    for (size_t i = 0; i < slots.size(); ++i) slots_[slots[i]] = tensors[i];
  }

  int64_t inputs_, output_ = -1;
  std::vector<Call> calls_;
  std::vector<at::Tensor> slots_;
  Slots held_;
};

// A thread that plays tapes in the order they are handed in. It is no thread of Python's and never waits for the
// interpreter's lock, so a pass goes on whatever Python does meanwhile.
struct TapePlayer : torch::CustomClassHolder {
  TapePlayer() : thread_([this] { run(); }) {}

  ~TapePlayer() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // Hands in a pass; what `wait` is asked for.
  int64_t submit(const c10::intrusive_ptr<Tape>& tape, std::vector<at::Tensor> inputs) {
    std::lock_guard lock(mutex_);
    jobs_.push_back({++submitted_, tape, std::move(inputs)});
    changed_.notify_all();
    return submitted_;
  }

  // A pass's output, once it is done; what it failed with, if it failed. Once for each pass.
  at::Tensor wait(int64_t ticket) {
    std::unique_lock lock(mutex_);
    TORCH_CHECK(ticket > 0 && ticket <= submitted_, "nothing was handed in under ", ticket);
    changed_.wait(lock, [&] { return done_.count(ticket) != 0; });
    auto done = std::move(done_.extract(ticket).mapped());
    if (done.error) std::rethrow_exception(done.error);
    return std::move(done.output);
  }

  bool is_done(int64_t ticket) {
    std::lock_guard lock(mutex_);
    return done_.count(ticket) != 0;
  }

 private:
  struct Job {
    int64_t ticket;
    c10::intrusive_ptr<Tape> tape;
    std::vector<at::Tensor> inputs;
  };
  struct Done {
    at::Tensor output;
    std::exception_ptr error;
    std::vector<at::Tensor> inputs;  // let go by whoever waits: to let go of a tensor of Python's takes the lock
  };

  void run() {
    at::init_num_threads();  // as many threads for a pass as other threads are given
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      Done done;
      try {
        done.output = job.tape->play(job.inputs);
      } catch (...) {
        done.error = std::current_exception();
      }
      done.inputs = std::move(job.inputs);
      lock.lock();
      done_[job.ticket] = std::move(done);
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::map<int64_t, Done> done_;
  int64_t submitted_ = 0;
  bool stopping_ = false;
  std::thread thread_;  // the last member: it uses the others
};

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
  library.class_<TapePlayer>("TapePlayer")
      .def(torch::init<>())
      .def("submit", &TapePlayer::submit)
      .def("wait", &TapePlayer::wait)
      .def("is_done", &TapePlayer::is_done);
}

}  // namespace infer
