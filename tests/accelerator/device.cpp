// A device of torch's PrivateUse1 kind with memory of its own, for tests of programs that train on accelerators.
//
// Every operator runs the CPU's kernel on the same bytes, so that results are the CPU's, bit for bit. What is different
// is where the bytes come from: each allocation of a kernel, scratch included, is taken from segments by the rules of
// CUDA's caching allocator, counted, and refused above a limit. A tensor of the host among the arguments is an error.
// No Python headers are needed: all that Python asks is an operator of the library `fedtest`.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/version.h>

#include <map>
#include <memory>

#include "allocator.h"

using namespace fedtest;

namespace {

// ------------------------------------------------------------------------------------------------- random numbers

at::Generator& generator_of(int device) {
  static std::vector<at::Generator> made;
  static std::once_flag once;
  std::call_once(once, [] {
    for (int i = 0; i < kMaxDevices; ++i) made.push_back(at::make_generator<at::CPUGeneratorImpl>(67280421310721u));
  });
  return made[device];
}

// ------------------------------------------------------------------------------------------------------ operators

using Stack = torch::jit::Stack;

struct Aliases {  // CPU tensors on the same bytes
  int device = -1;
  std::map<c10::StorageImpl*, c10::Storage> storages;            // of the device -> the CPU's
  std::map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> tensors;  // CPU -> (device's, CPU's)

  at::Tensor of(const at::Tensor& t) {
    if (!t.defined() || t.device().type() != kType) return t;
    auto* impl = t.storage().unsafeGetStorageImpl();
    if (!storages.count(impl)) {
      c10::Storage made(
          c10::Storage::use_byte_size_t(), impl->nbytes(),
          c10::DataPtr(const_cast<void*>(t.storage().data()), c10::Device(c10::DeviceType::CPU)), &g_host_allocator,
          /*resizable=*/true);
      storages.emplace(impl, std::move(made));
    }
    auto cpu = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storages.at(impl)), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    auto* raw = cpu.unsafeGetTensorImpl();
    raw->set_storage_offset(t.storage_offset());
    raw->set_sizes_and_strides(t.sizes(), t.strides());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) raw->set_wrapped_number(true);
    tensors.emplace(raw, std::make_pair(t, cpu));
    return cpu;
  }

  // a result of the CPU's kernel as a tensor of the device; without copying
  at::Tensor back(const at::Tensor& cpu, std::map<c10::StorageImpl*, c10::Storage>& moved) {
    if (!cpu.defined() || !cpu.device().is_cpu()) return cpu;
    auto same = tensors.find(cpu.unsafeGetTensorImpl());
    if (same != tensors.end()) return same->second.first;
    auto* impl = cpu.storage().unsafeGetStorageImpl();
    c10::Storage ours;
    for (auto& known : storages)
      if (known.second.unsafeGetStorageImpl() == impl) ours = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(known.first));
    if (!ours && moved.count(impl)) ours = moved.at(impl);
    if (!ours) {
      const c10::Device label(kType, c10::DeviceIndex(device));
      c10::DataPtr data;
      if (impl->nbytes() > 0 && impl->data_ptr().get_deleter() == &give_back) {
        c10::DataPtr old = impl->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
        void* at = old.get();
        data = c10::DataPtr(at, old.release_context(), &give_back, label);
      } else {  // made by another thread, or by a library
        data = data_on(device, impl->nbytes(), label);
        if (impl->nbytes()) memcpy(data.get(), cpu.storage().data(), impl->nbytes());
      }
      ours = c10::Storage(
          c10::Storage::use_byte_size_t(), impl->nbytes(), std::move(data), &g_device_allocator, /*resizable=*/true);
      moved.emplace(impl, ours);
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(ours), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(cpu.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
    return made;
  }

  // what `out=` and `resize_` changed of the arguments
  void settle() {
    for (auto& known : storages) {
      auto* cpu = known.second.unsafeGetStorageImpl();
      auto* own = known.first;
      if (cpu->data_ptr().get() != own->data_ptr().get()) {
        c10::DataPtr old = cpu->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
        void* at = old.get();
        own->set_data_ptr_noswap(
            c10::DataPtr(at, old.release_context(), &give_back, c10::Device(kType, c10::DeviceIndex(device))));
      }
      if (cpu->nbytes() != own->nbytes()) own->set_nbytes(cpu->nbytes());
    }
    for (auto& known : tensors) {
      auto &own = known.second.first, &cpu = known.second.second;
      if (own.sizes() != cpu.sizes() || own.strides() != cpu.strides() || own.storage_offset() != cpu.storage_offset()) {
        own.unsafeGetTensorImpl()->set_storage_offset(cpu.storage_offset());
        own.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
      }
    }
  }
};

[[noreturn]] void refuse_mixed(const c10::OperatorHandle& op, int device) {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, fedtest:", device,
      " and cpu! (", op.schema().name(), ")");
  std::abort();
}

bool may_be_of_host(const std::string& name, const std::string& argument, const at::Tensor& t) {
  if (t.dim() == 0) return true;  // as CUDA: numbers
  return argument == "indices" && (name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_");
}

template <class See>
void each_tensor(const c10::IValue& value, See see) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) see(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorList())
      if (t.defined()) see(t);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef())
      if (item.isTensor() && item.toTensor().defined()) see(item.toTensor());
  }
}

c10::IValue aliased(const c10::IValue& value, Aliases& aliases) {
  if (value.isTensor()) return aliases.of(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorList()) made.push_back(aliases.of(t));
    return made;
  }
  if (value.isList() && !value.toListRef().empty()) {
    bool any = false;
    for (const auto& item : value.toListRef()) any |= item.isTensor();
    if (any) {
      c10::List<c10::optional<at::Tensor>> made;
      for (const auto& item : value.toListRef())
        made.push_back(item.isTensor() ? c10::optional<at::Tensor>(aliases.of(item.toTensor())) : c10::nullopt);
      return made;
    }
  }
  return value;
}

void on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  Aliases aliases;
  for (size_t i = 0; i < count; ++i) {
    each_tensor((*stack)[first + i], [&](const at::Tensor& t) {
      if (t.device().type() == kType) {
        TORCH_CHECK(
            aliases.device < 0 || aliases.device == t.device().index(),
            "Expected all tensors to be on the same device, but found at least two devices, fedtest:", aliases.device,
            " and fedtest:", int(t.device().index()), "! (", schema.name(), ")");
        aliases.device = t.device().index();
      }
    });
  }
  if (aliases.device < 0) aliases.device = t_current;
  bool draws = false, has_generator = false;
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    each_tensor(value, [&](const at::Tensor& t) {
      if (t.device().type() != kType && !may_be_of_host(schema.name(), argument.name(), t)) refuse_mixed(op, aliases.device);
    });
    value = aliased(value, aliases);
    if (value.isDevice() && value.toDevice().type() == kType) value = c10::Device(c10::DeviceType::CPU);
    if (argument.name() == "generator") {
      has_generator = true;
      if (value.isNone()) value = generator_of(aliases.device);
    }
  }
  draws = !has_generator && op.hasTag(at::Tag::nondeterministic_seeded);
  at::Tensor before;
  if (draws) {  // it takes the default generator: let that be the device's meanwhile
    auto usual = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(usual.mutex());
    before = at::Tensor(usual.get_state());
    usual.set_state(at::Tensor(generator_of(aliases.device).get_state()));
  }
  {
    Running running(aliases.device);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (draws) {
    auto usual = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(usual.mutex());
    generator_of(aliases.device).set_state(at::Tensor(usual.get_state()));
    usual.set_state(before);
  }
  aliases.settle();
  std::map<c10::StorageImpl*, c10::Storage> moved;
  const size_t results = schema.returns().size(), start = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[start + i];
    if (value.isTensor()) {
      value = aliases.back(value.toTensor(), moved);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& t : value.toTensorList()) made.push_back(aliases.back(t, moved));
      value = made;
    }
  }
}

int index_of(c10::optional<c10::Device> device) {
  int index = device.has_value() && device->has_index() ? device->index() : t_current;
  TORCH_CHECK(index >= 0 && index < g_devices, "fedtest: invalid device ordinal ", index, " of ", g_devices);
  return index;
}

struct Current {
  int before = t_current;
  explicit Current(int device) { t_current = device; }
  ~Current() { t_current = before; }
};

at::Tensor empty(
    c10::IntArrayRef size, c10::optional<c10::ScalarType> dtype, c10::optional<c10::Layout>,
    c10::optional<c10::Device> device, c10::optional<bool>, c10::optional<c10::MemoryFormat> format) {
  Current current(index_of(device));
  return at::Tensor(at::detail::empty_generic(
      size, &g_device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::ScalarType::Float), format));
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, c10::optional<c10::ScalarType> dtype, c10::optional<c10::Layout>,
    c10::optional<c10::Device> device, c10::optional<bool>) {
  Current current(index_of(device));
  return at::Tensor(at::detail::empty_strided_generic(
      size, stride, &g_device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::ScalarType::Float)));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  Aliases aliases;
  aliases.device = to.device().type() == kType ? to.device().index() : from.device().index();
  at::Tensor source = aliases.of(from), target = aliases.of(to);
  Running running(to.device().type() == kType ? aliases.device : -1);
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// torch asks devices that are no CPU for a fused cell (RNN.cpp); in the CPU's order of operations
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& cx,
    const c10::optional<at::Tensor>& input_bias, const c10::optional<at::Tensor>& hidden_bias) {
  at::Tensor one = of_input, other = of_hidden;
  if (input_bias.has_value() && input_bias->defined()) one = one + *input_bias;
  if (hidden_bias.has_value() && hidden_bias->defined()) other = other + *hidden_bias;
  at::Tensor gates = other + one;
  auto parts = gates.chunk(4, 1);
  at::Tensor i = parts[0].sigmoid_(), f = parts[1].sigmoid_(), g = parts[2].tanh_(), o = parts[3].sigmoid_();
  at::Tensor cy = (f * cx).add_(i * g), hy = o * cy.tanh();
  return {hy, cy, gates};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const c10::optional<at::Tensor>& grad_hy_, const c10::optional<at::Tensor>& grad_cy_, const at::Tensor& cx,
    const at::Tensor& cy, const at::Tensor& gates, bool has_bias) {
  at::Tensor grad_hy = grad_hy_.has_value() && grad_hy_->defined() ? *grad_hy_ : at::zeros_like(cx);
  auto parts = gates.chunk(4, 1);
  at::Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3], t = cy.tanh();
  at::Tensor grad_c = grad_hy * o * (1 - t * t);
  if (grad_cy_.has_value() && grad_cy_->defined()) grad_c = *grad_cy_ + grad_c;
  at::Tensor grad = at::cat(
      {grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f), grad_c * i * (1 - g * g), grad_hy * t * o * (1 - o)}, 1);
  return {grad, grad_c * f, has_bias ? grad.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& hx,
    const c10::optional<at::Tensor>& input_bias, const c10::optional<at::Tensor>& hidden_bias) {
  at::Tensor one = of_input, other = of_hidden;
  if (input_bias.has_value() && input_bias->defined()) one = one + *input_bias;
  if (hidden_bias.has_value() && hidden_bias->defined()) other = other + *hidden_bias;
  auto of_one = one.chunk(3, 1), of_other = other.chunk(3, 1);
  at::Tensor reset = of_other[0].add(of_one[0]).sigmoid_(), input = of_other[1].add(of_one[1]).sigmoid_();
  at::Tensor made = of_one[2].add(of_other[2].mul(reset)).tanh_();
  at::Tensor hy = (hx - made).mul_(input).add_(made);
  return {hy, at::cat({reset, input, made, hx, of_other[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  at::Tensor reset = kept[0], input = kept[1], made = kept[2], hx = kept[3], of_hidden = kept[4];
  at::Tensor grad_input = grad * (hx - made) * input * (1 - input);
  at::Tensor grad_made = grad * (1 - input) * (1 - made * made);
  at::Tensor grad_reset = grad_made * of_hidden * reset * (1 - reset);
  at::Tensor one = at::cat({grad_reset, grad_input, grad_made}, 1);
  at::Tensor other = at::cat({grad_reset, grad_input, grad_made * reset}, 1);
  at::Tensor none;
  return {one, other, grad * input, has_bias ? one.sum(0) : none, has_bias ? other.sum(0) : none};
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 5
// an unknown device would get the attention that is written out, whose sums are in another order than the CPU's
at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const c10::optional<at::Tensor>& mask,
    double dropout, bool causal, c10::optional<double> scale, bool enable_gqa) {
  if (at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, enable_gqa) == 1)
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, causal, c10::nullopt, scale, enable_gqa));
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("scaled_dot_product_attention", &attention); }
#endif

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  // composite operators of ATen that would choose another way for an unknown device: the CPU's way
  for (const char* name :
       {"convolution", "convolution_backward", "native_layer_norm", "native_group_norm", "_stack", "_stack.out", "addr",
        "addr.out"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// ------------------------------------------------------------------------------------------------------- autocasting

at::ScalarType lower_type() {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 4
  return at::autocast::get_autocast_dtype(kType);
#else
  return at::autocast::get_autocast_privateuseone_dtype();
#endif
}

bool is_lowered(const std::string& name) {
  static const std::set<std::string> kLowered{
      "aten::convolution", "aten::_convolution", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::linear",
      "aten::matmul", "aten::mm", "aten::mv", "aten::bmm", "aten::addmm", "aten::addbmm", "aten::baddbmm",
      "aten::einsum", "aten::prelu", "aten::lstm_cell", "aten::gru_cell", "aten::scaled_dot_product_attention"};
  return kLowered.count(name) > 0;
}

// CUDA's two usual rules: products compute in the lower type, what sums or exponentiates in float32
void autocasting(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto type = is_lowered(op.schema().name()) ? lower_type() : at::kFloat;
  const auto cast = [&](const at::Tensor& t) { return at::autocast::cached_cast(type, t, kType); };
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& t : value.toTensorList()) made.push_back(cast(t));
      value = made;
    }
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"convolution", "_convolution", "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "mv", "bmm", "addmm",
        "addbmm", "baddbmm", "einsum", "prelu", "lstm_cell", "gru_cell", "scaled_dot_product_attention",
        "softmax.int", "log_softmax.int", "exp", "log", "pow.Tensor_Scalar", "rsqrt", "softplus", "layer_norm",
        "native_layer_norm", "group_norm", "cosine_similarity", "nll_loss", "nll_loss2d", "kl_div", "l1_loss",
        "smooth_l1_loss", "huber_loss", "mse_loss", "binary_cross_entropy_with_logits", "logsumexp", "dist", "cdist",
        "sum", "sum.dim_IntList", "cumsum", "prod", "linalg_vector_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&autocasting>());
}

// ----------------------------------------------------------------------------------------------- what torch asks of it

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, c10::DeviceIndex(t_current)); }
  void setDevice(c10::Device d) const override { t_current = d.has_index() ? d.index() : 0; }
  void uncheckedSetDevice(c10::Device d) const noexcept override { t_current = d.has_index() ? d.index() : 0; }
  c10::Stream getStream(c10::Device d) const noexcept { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(g_devices); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kType, &g_device_allocator);

struct TheirGenerator final : at::CPUGeneratorImpl {};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const {
    return generator_of(device < 0 ? t_current : device);
  }
};

int64_t set_up(int64_t devices) {
  static bool done = false;
  g_devices = int(devices);
  if (!done) {
    g_host_allocator.usual = c10::GetCPUAllocator();
    g_usual_delete = g_host_allocator.usual->raw_deleter();
    c10::SetCPUAllocator(&g_host_allocator, /*priority=*/200);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    done = true;
  }
  return devices;
}

std::vector<int64_t> stats(int64_t device) {
  Memory& m = g_memory[device];
  std::lock_guard<std::mutex> lock(m.mutex);
  return {int64_t(m.allocated), int64_t(m.reserved), int64_t(m.peak_allocated), int64_t(m.peak_reserved), m.ooms,
          m.retries, int64_t(total_of(int(device))), int64_t(held_by_all(int(device)))};
}

int64_t command(int64_t device, std::string what, int64_t value) {
  Memory& m = g_memory[device];
  std::lock_guard<std::mutex> lock(m.mutex);
  if (what == "total") ledger().total[device] = value;
  else if (what == "taken") ledger().taken[device] = value;
  else if (what == "context") make_context(int(device));
  else if (what == "allowed") m.allowed = value < 0 ? SIZE_MAX : size_t(value);
  else if (what == "reset_peak") m.peak_allocated = m.allocated, m.peak_reserved = m.reserved;
  else if (what == "empty_cache") release_cached(m);
  else if (what == "trace") m.traced = value, m.trace.clear(), m.ids.clear();
  else if (what == "seed") generator_of(int(device)).set_current_seed(uint64_t(value));
  else if (what == "set") return std::exchange(t_current, int(device));
  else if (what == "current") return t_current;
  else TORCH_CHECK(false, "fedtest: unknown command ", what);
  return 0;
}

std::vector<int64_t> trace(int64_t device) {
  Memory& m = g_memory[device];
  std::lock_guard<std::mutex> lock(m.mutex);
  std::vector<int64_t> flat;
  for (const Event& event : m.trace) flat.push_back(event.id), flat.push_back(event.size);
  return flat;
}

at::Tensor state(int64_t device) { return at::Tensor(generator_of(int(device)).get_state()); }
void set_state(int64_t device, const at::Tensor& value) { generator_of(int(device)).set_state(value); }

// process and bytes, of everyone who holds memory of the device, as NVML tells it
std::vector<int64_t> users(int64_t device) {
  std::vector<int64_t> flat;
  for (const Slot& slot : ledger().slots)
    if (alive(slot.pid) && slot.held[device] > 0) flat.push_back(slot.pid), flat.push_back(slot.held[device]);
  return flat;
}

TORCH_LIBRARY(fedtest, m) {
  m.def("set_up(int devices) -> int", &set_up);
  m.def("stats(int device) -> int[]", &stats);
  m.def("command(int device, str what, int value) -> int", &command);
  m.def("trace(int device) -> int[]", &trace);
  m.def("users(int device) -> int[]", &users);
  m.def("state(int device) -> Tensor", &state);
  m.def("set_state(int device, Tensor value) -> ()", &set_state);
}

}  // namespace
