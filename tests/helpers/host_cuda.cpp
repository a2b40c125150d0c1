// A device of type `cuda` for a build of torch without CUDA: its memory is host memory, its kernels are the CPU's.
//
// torch does the rest: `tensor.is_cuda`, storages, views, autograd with a thread for the device, `Module.to`, and the
// checks of devices. This file has an allocator that counts bytes, a guard with streams and events, generators, and a
// fallback for the dispatch key CUDA. The fallback lends a call's tensors to the CPU's kernel, as aliases of the same
// memory. As on CUDA, a host tensor next to the device's raises an error.
//
// Work is done at once. What streams, events and the host have waited for is recorded as vector clocks, and an access to
// memory that nothing has ordered after an earlier one is a race.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace {
using at::Tensor;
using c10::Device, c10::DeviceType, c10::Stream, c10::IValue;

int variable(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoi(text) : otherwise;
}
// A rank has the device of its number, and can't see the others' memory.
const Device GPU(DeviceType::CUDA, variable("LOCAL_RANK", 0));
const c10::DeviceIndex DEVICES = std::max(variable("LOCAL_WORLD_SIZE", 1), GPU.index() + 1);

std::recursive_mutex mutex;  // of all state below
using Own = std::lock_guard<std::recursive_mutex>;
int64_t bytes, peak, capacity = int64_t(80) << 30;
int (*report)(const char* kind, const char* text) = nullptr;  // Python's; returns whether to raise an error

// Python is told without the mutex, since a thread that has Python's lock may wait for the mutex.
void wait(const std::string& text) {
  TORCH_CHECK(!report || !report("wait", text.c_str()), "called a synchronizing CUDA operation: ", text);
}
thread_local std::vector<std::string> races;
void report_races() {
  if (races.empty()) return;
  for (auto& text : std::exchange(races, {})) if (report) report("race", text.c_str());
}

// -- the device's memory

struct Access { int64_t from, to, stream, time; bool writes; };  // a range of a block's bytes
struct Block { void* data; int64_t size, stream; std::vector<Access> accesses; std::set<int64_t> recorded; };
std::map<const char*, Block*> blocks;  // by address
std::vector<Block> freed;  // blocks that another stream than their own may still use
using Clock = std::map<int64_t, int64_t>;  // by stream: how much of its work has happened before
const int64_t HOST = -1;
std::map<int64_t, Clock> clocks;  // by stream, or HOST
thread_local int64_t current = 0;  // stream

void advance(Clock& clock, const Clock& other) {
  for (auto& [stream, time] : other) clock[stream] = std::max(clock[stream], time);
}

// Freed memory stays poisoned for a while, so that a stale pointer reads garbage and not the next tensor.
const int64_t QUARANTINE = int64_t(64) << 20;
std::deque<std::pair<void*, int64_t>> quarantine;
int64_t quarantined;

void release(void* context) {
  Own own(mutex);
  auto* block = static_cast<Block*>(context);
  bytes -= block->size;
  blocks.erase(static_cast<const char*>(block->data));
  std::erase_if(block->accesses, [&](auto& use) { return use.stream == block->stream || block->recorded.count(use.stream); });
  if (!block->accesses.empty()) freed.push_back(*block);
  memset(block->data, 0xFB, block->size);
  quarantine.emplace_back(block->data, block->size);
  for (quarantined += block->size; quarantined > QUARANTINE; quarantine.pop_front()) {
    quarantined -= quarantine.front().second;
    free(quarantine.front().first);
  }
  delete block;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (!size) return {nullptr, GPU};
    std::unique_lock<std::recursive_mutex> own(mutex);
    TORCH_CHECK_WITH(OutOfMemoryError, bytes + int64_t(size) <= capacity, "CUDA out of memory. Tried to allocate ", size);
    Clock& clock = clocks[current];
    advance(clock, clocks[HOST]);
    std::erase_if(freed, [&](Block& old) {  // torch's allocator gives a block to the stream that had it
      if (old.stream != current) return false;
      std::erase_if(old.accesses, [&](auto& use) { return clock[use.stream] >= use.time; });
      const bool reused = !old.accesses.empty() && old.size >= int64_t(size);
      if (reused) races.push_back("memory was freed, and may be allocated again, while stream " + std::to_string(old.accesses[0].stream) + " still uses it");
      return reused || old.accesses.empty();
    });
    auto* block = new Block{aligned_alloc(512, (size + 511) / 512 * 512), int64_t(size), current, {{0, int64_t(size), current, clock[current], true}}, {}};
    memset(block->data, 0xFF, size);  // NaN, or -1, for whoever reads it before it was written
    blocks[static_cast<const char*>(block->data)] = block;
    peak = std::max(peak, bytes += size);
    own.unlock();
    report_races();
    return {block->data, block, &release, GPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} memory;

std::map<const char*, int64_t> pinned;  // sizes of page-locked host memory, by address
void unpin(void* data) {
  Own own(mutex);
  pinned.erase(static_cast<const char*>(data));
  free(data);
}
struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Own own(mutex);
    void* data = aligned_alloc(512, (size + 512) / 512 * 512);
    pinned[static_cast<const char*>(data)] = size;
    return {data, data, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
} pinned_memory;
bool is_pinned(const void* data) {
  Own own(mutex);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  return next != pinned.begin() && (--next, static_cast<const char*>(data) < next->first + std::max<int64_t>(next->second, 1));
}

// -- streams and events

struct Copy { int64_t stream, time; Tensor host, values; bool to_host; };  // queued, between page-locked memory and the device
std::vector<Copy> queue;
struct Event { Clock clock; };

std::pair<const char*, const char*> span(const Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto* from = static_cast<const char*>(tensor.const_data_ptr());
  return {from, from + elements * tensor.itemsize()};
}
// Finish the queued copies that have happened at `clock`: of all memory, or of the memory of `host`.
void finish_copies(const Clock& clock, const Tensor* host = nullptr) {
  for (auto copy = queue.begin(); copy != queue.end();) {
    if (host) {
      auto [a, b] = span(*host);
      auto [c, d] = span(copy->host);
      if (a >= d || c >= b) { ++copy; continue; }
    }
    auto time = clock.find(copy->stream);
    if (time == clock.end() || time->second < copy->time) {
      if (host) races.push_back("two copies of the same host memory without an order");
      ++copy;
      continue;
    }
    c10::InferenceMode allows_any_tensor;
    if (copy->to_host) copy->host.copy_(copy->values);
    else if (memcmp(copy->host.contiguous().data_ptr(), copy->values.data_ptr(), copy->values.nbytes()))
      races.push_back("the host wrote memory that was still being copied to the device");
    copy = queue.erase(copy);
  }
}
void host_waits(const Clock& clock) {
  {
    Own own(mutex);
    finish_copies(clock);
    advance(clocks[HOST], clock);
  }
  report_races();
}
void host_waits_for(int64_t stream) {
  std::unique_lock<std::recursive_mutex> own(mutex);
  const Clock now = clocks[stream];
  own.unlock();
  host_waits(now);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Stream getStream(Device) const override { return Stream(Stream::UNSAFE, GPU, current); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, GPU, 0); }
  Stream getNewStream(Device, int) const override {
    static int64_t last = 0;
    Own own(mutex);
    return Stream(Stream::UNSAFE, GPU, ++last);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override { return Stream(Stream::UNSAFE, GPU, std::exchange(current, stream.id())); }
  void record(void** event, const Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Own own(mutex);
    if (!*event) *event = new Event;
    advance(clocks[stream.id()], clocks[HOST]);  // what the host had waited for when it queued this
    static_cast<Event*>(*event)->clock = clocks[stream.id()];
  }
  void block(void* event, const Stream& stream) const override {
    Own own(mutex);
    if (event) advance(clocks[stream.id()], static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { synchronizeEvent(event); return true; }
  bool queryStream(const Stream& stream) const override { synchronizeStream(stream); return true; }
  void synchronizeEvent(void* event) const override { if (event) host_waits(static_cast<Event*>(event)->clock); }
  void synchronizeStream(const Stream& stream) const override { host_waits_for(stream.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    std::unique_lock<std::recursive_mutex> own(mutex);
    const std::map<int64_t, Clock> now = clocks;
    own.unlock();
    for (auto& [stream, clock] : now) host_waits(clock);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Count an operation of the current stream, and what the host had waited for when it queued it.
void tick() { Own own(mutex); advance(clocks[current], clocks[HOST]); ++clocks[current][current]; }

void access(const Tensor& tensor, bool writes, const std::string& name) {
  if (!tensor.numel()) return;
  Own own(mutex);
  auto block = blocks.find(static_cast<const char*>(tensor.storage().data()));
  if (block == blocks.end()) return;
  auto [first, last] = span(tensor);
  const int64_t from = first - block->first, to = last - block->first;
  Clock& clock = clocks[current];
  auto& accesses = block->second->accesses;
  for (auto& other : accesses)
    if ((writes || other.writes) && other.from < to && from < other.to && clock[other.stream] < other.time)
      races.push_back(name + (writes ? " writes" : " reads") + " what stream " + std::to_string(other.stream) +
           (other.writes ? " wrote" : " read") + ", without waiting, on stream " + std::to_string(current));
  std::erase_if(accesses, [&](auto& other) { return writes ? from <= other.from && other.to <= to
                : !other.writes && other.stream == current && from <= other.from && other.to <= to; });
  accesses.push_back({from, to, current, clock[current], writes});
}

// -- generators and what torch asks of CUDA

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(at::Generator of) : c10::GeneratorImpl(GPU, c10::DispatchKeySet(c10::DispatchKey::CUDA)), cpu(std::move(of)) {}
  static DeviceType device_type() { return DeviceType::CUDA; }
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }
};
at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }
const at::Generator& default_generator() {
  static at::Generator generator = new_generator();
  return generator;
}

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return GPU.index(); }
  c10::DeviceIndex getCurrentDevice() const override { return GPU.index(); }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return GPU.index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return GPU.index(); }
  Device getDeviceFromPtr(void*) const override { return GPU; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
};

// -- kernels

void resize_storage(c10::StorageImpl* storage, int64_t size) {
  c10::DataPtr data = memory.allocate(size);
  if (size && storage->nbytes()) memcpy(data.get(), storage->data(), std::min<int64_t>(size, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}
Tensor with_storage(const c10::Storage& storage, const Tensor& shape, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), shape.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), shape.storage_offset());
  return tensor;
}
c10::Storage alias(const c10::Storage& of, Device device, c10::Allocator* allocator) {  // of the same memory, which it keeps alive
  c10::DataPtr data(of.mutable_data(), new c10::Storage(of), [](void* storage) { delete static_cast<c10::Storage*>(storage); }, device);
  return c10::Storage(c10::Storage::use_byte_size_t{}, of.nbytes(), std::move(data), allocator, true);
}
Tensor as_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return with_storage(alias(tensor.storage(), Device(DeviceType::CPU), c10::GetCPUAllocator()), tensor, c10::DispatchKey::CPU);
}
Tensor in_device_memory(const Tensor& result) {  // a copy of what the CPU's kernel returned
  c10::Storage storage(c10::Storage::use_byte_size_t{}, result.storage().nbytes(), &memory, true);
  memcpy(storage.mutable_data(), result.storage().data(), storage.nbytes());
  return with_storage(storage, result, c10::DispatchKey::CUDA);
}

const std::set<std::string> WAITS{"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "is_nonzero", "bincount", "repeat_interleave"};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string full = schema.name(), name = full.substr(full.find("::") + 2);
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  struct Argument { Tensor device, host; bool writes; };
  std::vector<Argument> lent;
  bool waits = WAITS.count(name);
  tick();
  auto lend = [&](const Tensor& tensor, bool writes) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {  // as on CUDA a number of the host may be an operand, but not the result
      TORCH_CHECK((tensor.dim() == 0 && !writes) || tensor.is_meta(), "Expected all tensors to be on the same device, but found at least two devices, ",
                  GPU, " and ", tensor.device(), "! (", full, ", argument of shape ", tensor.sizes(), ")");
      return tensor;
    }
    access(tensor, writes, full);
    lent.push_back({tensor, as_host(tensor), writes});
    return lent.back().host;
  };
  for (size_t i = 0; i < count; ++i) {
    IValue& value = (*stack)[first + i];
    const auto& argument = schema.arguments()[i];
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) value = lend(value.toTensor(), writes);
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(lend(each, writes));
      value = list;
    } else if (value.isOptionalTensorList()) {  // indices, which may be the host's: they are copied
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
        const bool on_host = each && each->defined() && !each->is_cuda();
        waits |= on_host && each->dim() > 0;
        list.push_back(each && !on_host ? std::optional(lend(*each, writes)) : each);
      }
      value = list;
    } else if (value.isDevice()) value = Device(DeviceType::CPU);
    else if (argument.type()->str().rfind("Generator", 0) == 0) {
      at::Generator generator = value.isNone() ? default_generator() : value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", generator.device(), "'");
      value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
    }
  }
  report_races();
  if (waits) {
    wait(full);
    host_waits_for(current);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [device, host, writes] : lent)
    if (writes && (host.sizes() != device.sizes() || host.strides() != device.strides())) {  // the kernel has changed the shape
      auto* own = device.unsafeGetTensorImpl();
      if (host.storage().nbytes() > device.storage().nbytes()) resize_storage(own->unsafe_storage().unsafeGetStorageImpl(), host.storage().nbytes());
      if (host.storage().data() != device.storage().data()) memcpy(device.storage().mutable_data(), host.storage().data(), host.storage().nbytes());
      own->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  auto returned = [&](const Tensor& result) -> Tensor {
    if (!result.defined()) return result;
    for (auto& argument : lent) if (result.is_same(argument.host)) return argument.device;
    for (auto& argument : lent)
      if (result.storage().data() && result.storage().data() == argument.device.storage().data()) return with_storage(argument.device.storage(), result, c10::DispatchKey::CUDA);
    Tensor copy = in_device_memory(result);
    access(copy, true, full);
    return copy;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) value = returned(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(returned(each));
      value = list;
    }
  }
}

void check_new(std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(!device || !device->has_index() || *device == GPU, "rank's memory on ", *device, ", but its device is ", GPU);
}
Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_new(device, pin);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  check_new(device, pin);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || !self.numel()) return self;
  tick();
  if (source.is_cuda()) access(source, false, "copy_");
  if (self.is_cuda()) access(self, true, "copy_");
  const bool crosses = self.is_cuda() != source.is_cuda(), to_host = !self.is_cuda();
  const Tensor& host = to_host ? self : source;
  const bool queued = crosses && non_blocking && is_pinned(host.data_ptr());
  std::unique_lock<std::recursive_mutex> own(mutex);
  if (crosses) finish_copies(clocks[current], &host);
  if (queued && to_host) {  // until the host has waited it reads garbage
    Tensor values = at::empty(self.sizes(), self.options().pinned_memory(false)).copy_(as_host(source).expand_as(self));
    queue.push_back({current, clocks[current][current], self, values, true});
    Tensor garbage = at::empty(self.sizes(), self.options().pinned_memory(false));
    memset(garbage.data_ptr(), 0xFB, garbage.nbytes());
    self.copy_(garbage);
    own.unlock();
    report_races();
    return self;
  }
  if (queued) queue.push_back({current, clocks[current][current], source, source.clone(), false});
  own.unlock();
  report_races();
  if (crosses && !queued) {
    wait(std::string("copy_ ") + (to_host ? "to" : "from") + " the host" + (non_blocking ? ", whose memory isn't page-locked" : ""));
    host_waits_for(current);
  }
  Tensor destination = as_host(self);
  destination.copy_(as_host(source));
  return self;
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, std::move(source), 0, {size}, {});
}
Tensor& set_nothing(Tensor& self) { return set_whole_storage(self, c10::Storage(c10::Storage::use_byte_size_t{}, 0, &memory, true)); }
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset ? std::optional(offset->expect_int()) : std::nullopt);
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
void record_stream(Tensor& self, Stream stream) {  // the allocator will wait for this stream before it reuses the memory
  Own own(mutex);
  auto block = blocks.find(static_cast<const char*>(self.storage().data()));
  if (block != blocks.end()) block->second->recorded.insert(stream.id());
}
Tensor device_view_of_host(const Tensor& host) {  // unified addressing
  TORCH_CHECK(is_pinned(host.data_ptr()), "only page-locked memory can be seen by the device");
  return with_storage(alias(host.storage(), GPU, &memory), host, c10::DispatchKey::CUDA);
}
}  // namespace

namespace at {
using HostCudaHooks = Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, HostCudaHooks)
namespace native {
int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &math_attention)
}
}  // namespace at

TORCH_LIBRARY(host_cuda, library) {
  library.def("device_view_of_host(Tensor host) -> Tensor", &device_view_of_host);
  library.def("reduce_op", [](const c10::intrusive_ptr<c10d::ReduceOp>& op) { return static_cast<int64_t>(op->op_); });
}
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_", &set_nothing);
  library.impl("view", &view);
  library.impl("as_strided", &as_strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("record_stream", &record_stream);
  for (auto name : {"convolution", "convolution_backward"})  // these choose kernels that only CUDA has
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

extern "C" {
void host_cuda_start(int (*callback)(const char*, const char*)) {
  report = callback;
  c10::SetAllocator(DeviceType::CUDA, &memory, 100);
}
int64_t host_cuda_bytes() { return bytes; }
int64_t host_cuda_peak(bool reset) { return reset ? peak = bytes : peak; }
int64_t host_cuda_capacity(int64_t size) { return size ? capacity = size : capacity; }
void host_cuda_pin(const char* data, int64_t size) {
  Own own(mutex);
  if (size) pinned[data] = size; else pinned.erase(data);
}
void host_cuda_resize(void* storage, int64_t size) { resize_storage(static_cast<c10::StorageImpl*>(storage), size); }
int64_t host_cuda_stream() { return current; }
void host_cuda_synchronize() { Guard().synchronizeDevice(0); }
}
