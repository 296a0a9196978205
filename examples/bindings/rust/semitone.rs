//! Semitone for Rust: policies, regions, loss scaling and master weights of `libsemitone_c`.
//!
//! `TensorPtr` is a pointer to a C++ `at::Tensor`: `tensor.as_ptr()` of tch, cast with `as`. The
//! functions that take such pointers are unsafe, since Rust cannot know that they are tensors.

use std::ffi::{CStr, CString};
use std::fmt;
use std::marker::PhantomData;
use std::os::raw::c_char;
use std::ptr::null_mut;

/// A C++ `at::Tensor`.
#[repr(C)]
pub struct RawTensor {
    _opaque: [u8; 0],
}
pub type TensorPtr = *mut RawTensor;

pub const FLOAT16: i32 = 5;
pub const FLOAT32: i32 = 6;
pub const BFLOAT16: i32 = 15;

/// An option of a loss scale by its name: `SemitoneOption`.
#[repr(C)]
struct RawOption {
    name: *const c_char,
    value: f64,
}

/// An argument of `call` in C: `SemitoneValue`.
#[repr(C)]
struct RawValue {
    kind: i32,
    count: usize,
    value: RawContent,
}
#[repr(C)]
union RawContent {
    tensor: TensorPtr,
    integer: i64,
    real: f64,
    integers: *const i64,
}

macro_rules! handles {
    ($($name:ident)*) => { $(#[repr(C)] struct $name { _opaque: [u8; 0] })* };
}
handles!(RawPolicy RawRegion RawScaler RawMasters);

extern "C" {
    fn semitone_last_error() -> *const c_char;
    fn semitone_tensor_create(data: *const u8, bytes: usize, dtype: i32, sizes: *const i64, dims: usize, tensor: *mut TensorPtr) -> i32;
    fn semitone_tensor_destroy(tensor: TensorPtr) -> i32;
    fn semitone_tensor_read(tensor: TensorPtr, data: *mut u8, bytes: usize) -> i32;
    fn semitone_tensor_set_requires_grad(tensor: TensorPtr, requires_grad: i32) -> i32;
    fn semitone_tensor_grad(tensor: TensorPtr, grad: *mut TensorPtr) -> i32;
    fn semitone_tensor_set_grad(tensor: TensorPtr, grad: TensorPtr) -> i32;
    fn semitone_tensor_backward(tensor: TensorPtr) -> i32;
    fn semitone_set_grad_enabled(enabled: i32, before: *mut i32) -> i32;
    fn semitone_call(
        op: *const c_char, arguments: *const RawValue, argument_count: usize, results: *mut TensorPtr, capacity: usize,
        count: *mut usize,
    ) -> i32;
    fn semitone_policy_create(preset: *const c_char, device: *const c_char, dtype: i32, policy: *mut *mut RawPolicy) -> i32;
    fn semitone_policy_destroy(policy: *mut RawPolicy) -> i32;
    fn semitone_policy_set(policy: *mut RawPolicy, op: *const c_char, action: i32) -> i32;
    fn semitone_region_enter(policy: *const RawPolicy, region: *mut *mut RawRegion) -> i32;
    fn semitone_region_exit(region: *mut RawRegion) -> i32;
    fn semitone_scaler_create(preset: *const c_char, options: *const RawOption, count: usize, scaler: *mut *mut RawScaler) -> i32;
    fn semitone_scaler_destroy(scaler: *mut RawScaler) -> i32;
    fn semitone_scaler_scale(scaler: *mut RawScaler, loss: TensorPtr, scaled: *mut TensorPtr) -> i32;
    fn semitone_scaler_unscale(scaler: *mut RawScaler, parameters: *const TensorPtr, count: usize, found_inf: *mut i32) -> i32;
    fn semitone_scaler_update(scaler: *mut RawScaler) -> i32;
    fn semitone_scaler_get_scale(scaler: *const RawScaler, scale: *mut f64) -> i32;
    fn semitone_masters_create(parameters: *const TensorPtr, count: usize, masters: *mut *mut RawMasters) -> i32;
    fn semitone_masters_destroy(masters: *mut RawMasters) -> i32;
    fn semitone_masters_list(masters: *const RawMasters, tensors: *mut TensorPtr, count: usize) -> i32;
    fn semitone_masters_take_gradients(masters: *mut RawMasters) -> i32;
    fn semitone_masters_clear_gradients(masters: *mut RawMasters) -> i32;
    fn semitone_masters_write_model(masters: *mut RawMasters) -> i32;
}

/// An error of the library: the status of C, and the message.
#[derive(Debug)]
pub struct Error {
    pub status: i32,
    message: String,
}
impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(&self.message)
    }
}
impl std::error::Error for Error {}
pub type Result<T> = std::result::Result<T, Error>;

fn check(status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let message = unsafe { CStr::from_ptr(semitone_last_error()) }.to_string_lossy().into_owned();
    Err(Error { status, message })
}

fn c_string(text: &str) -> CString {
    CString::new(text).expect("a string without zero bytes")
}

/// Which operators run in 16 bits.
pub struct Policy(*mut RawPolicy);
impl Policy {
    pub fn new(preset: &str, device: &str, dtype: i32) -> Result<Self> {
        let mut policy = null_mut();
        check(unsafe { semitone_policy_create(c_string(preset).as_ptr(), c_string(device).as_ptr(), dtype, &mut policy) })?;
        Ok(Self(policy))
    }
    /// Keeps an operator in fp32.
    pub fn keep_fp32(self, op: &str) -> Result<Self> {
        check(unsafe { semitone_policy_set(self.0, c_string(op).as_ptr(), 1) })?;
        Ok(self)
    }
    /// Enters a region on this thread. It ends when the value is dropped, in reverse order.
    pub fn enter(&self) -> Result<Region> {
        let mut region = null_mut();
        check(unsafe { semitone_region_enter(self.0, &mut region) })?;
        Ok(Region(region, PhantomData))
    }
}
impl Drop for Policy {
    fn drop(&mut self) {
        unsafe { semitone_policy_destroy(self.0) };
    }
}

/// Until it is dropped, operators of this thread run under the policy. The pointer in it keeps it on
/// its thread: it is not `Send`. A region that is dropped before one inside it stays in force, with a
/// message on stderr.
pub struct Region(*mut RawRegion, PhantomData<*const ()>);
impl Drop for Region {
    fn drop(&mut self) {
        if let Err(error) = check(unsafe { semitone_region_exit(self.0) }) {
            eprintln!("{error}");
        }
    }
}

/// A loss scale.
pub struct Scaler(*mut RawScaler);
impl Scaler {
    pub fn new(preset: &str, options: &[(&str, f64)]) -> Result<Self> {
        let names: Vec<CString> = options.iter().map(|(name, _)| c_string(name)).collect();
        let raw: Vec<RawOption> =
            names.iter().zip(options).map(|(name, option)| RawOption { name: name.as_ptr(), value: option.1 }).collect();
        let mut scaler = null_mut();
        check(unsafe { semitone_scaler_create(c_string(preset).as_ptr(), raw.as_ptr(), raw.len(), &mut scaler) })?;
        Ok(Self(scaler))
    }
    /// Returns loss * scale, a new at::Tensor for the caller.
    /// # Safety
    /// `loss` points to an at::Tensor.
    pub unsafe fn scale(&mut self, loss: TensorPtr) -> Result<TensorPtr> {
        let mut scaled = null_mut();
        check(semitone_scaler_scale(self.0, loss, &mut scaled))?;
        Ok(scaled)
    }
    /// Unscales the gradients of parameters. Returns whether the step has to be skipped.
    /// # Safety
    /// All pointers point to an at::Tensor.
    pub unsafe fn unscale(&mut self, parameters: &[TensorPtr]) -> Result<bool> {
        let mut found_inf = 0;
        check(semitone_scaler_unscale(self.0, parameters.as_ptr(), parameters.len(), &mut found_inf))?;
        Ok(found_inf != 0)
    }
    pub fn update(&mut self) -> Result<()> {
        check(unsafe { semitone_scaler_update(self.0) })
    }
    pub fn get_scale(&self) -> Result<f64> {
        let mut scale = 0.0;
        check(unsafe { semitone_scaler_get_scale(self.0, &mut scale) })?;
        Ok(scale)
    }
}
impl Drop for Scaler {
    fn drop(&mut self) {
        unsafe { semitone_scaler_destroy(self.0) };
    }
}

/// fp32 masters of 16-bit parameters.
pub struct Masters(*mut RawMasters);
impl Masters {
    /// # Safety
    /// All pointers point to an at::Tensor.
    pub unsafe fn new(parameters: &[TensorPtr]) -> Result<Self> {
        let mut masters = null_mut();
        check(semitone_masters_create(parameters.as_ptr(), parameters.len(), &mut masters))?;
        Ok(Self(masters))
    }
    /// Returns the tensors that the optimizer is to update: new at::Tensors for the caller.
    pub fn list(&self, count: usize) -> Result<Vec<TensorPtr>> {
        let mut tensors = vec![null_mut(); count];
        check(unsafe { semitone_masters_list(self.0, tensors.as_mut_ptr(), count) })?;
        Ok(tensors)
    }
    pub fn take_gradients(&mut self) -> Result<()> {
        check(unsafe { semitone_masters_take_gradients(self.0) })
    }
    pub fn clear_gradients(&mut self) -> Result<()> {
        check(unsafe { semitone_masters_clear_gradients(self.0) })
    }
    pub fn write_model(&mut self) -> Result<()> {
        check(unsafe { semitone_masters_write_model(self.0) })
    }
}
impl Drop for Masters {
    fn drop(&mut self) {
        unsafe { semitone_masters_destroy(self.0) };
    }
}

/// A tensor for programs without tch.
pub struct Tensor(TensorPtr);
impl Tensor {
    pub fn of(data: &[f32], sizes: &[i64]) -> Result<Self> {
        let mut tensor = null_mut();
        check(unsafe { semitone_tensor_create(data.as_ptr().cast(), std::mem::size_of_val(data), FLOAT32, sizes.as_ptr(), sizes.len(), &mut tensor) })?;
        Ok(Self(tensor))
    }
    /// # Safety
    /// The pointer is a new at::Tensor, of which no other value takes care.
    pub unsafe fn from_ptr(tensor: TensorPtr) -> Self {
        Self(tensor)
    }
    pub fn as_ptr(&self) -> TensorPtr {
        self.0
    }
    pub fn read(&self, count: usize) -> Result<Vec<f32>> {
        let mut data = vec![0.0_f32; count];
        check(unsafe { semitone_tensor_read(self.0, data.as_mut_ptr().cast(), count * std::mem::size_of::<f32>()) })?;
        Ok(data)
    }
    pub fn require_grad(self) -> Result<Self> {
        check(unsafe { semitone_tensor_set_requires_grad(self.0, 1) })?;
        Ok(self)
    }
    pub fn grad(&self) -> Result<Option<Tensor>> {
        let mut grad = null_mut();
        check(unsafe { semitone_tensor_grad(self.0, &mut grad) })?;
        Ok(if grad.is_null() { None } else { Some(Tensor(grad)) })
    }
    pub fn clear_grad(&self) -> Result<()> {
        check(unsafe { semitone_tensor_set_grad(self.0, null_mut()) })
    }
    pub fn backward(&self) -> Result<()> {
        check(unsafe { semitone_tensor_backward(self.0) })
    }
}
impl Drop for Tensor {
    fn drop(&mut self) {
        unsafe { semitone_tensor_destroy(self.0) };
    }
}

/// An argument of `call`.
pub enum Value<'a> {
    Tensor(&'a Tensor),
    Int(i64),
    Double(f64),
    Ints(&'a [i64]),
}
impl Value<'_> {
    fn raw(&self) -> RawValue {
        match self {
            Value::Tensor(tensor) => RawValue { kind: 1, count: 0, value: RawContent { tensor: tensor.0 } },
            Value::Int(integer) => RawValue { kind: 2, count: 0, value: RawContent { integer: *integer } },
            Value::Double(real) => RawValue { kind: 3, count: 0, value: RawContent { real: *real } },
            Value::Ints(list) => RawValue { kind: 7, count: list.len(), value: RawContent { integers: list.as_ptr() } },
        }
    }
}

/// Calls an operator of LibTorch with one result.
pub fn call(op: &str, arguments: &[Value]) -> Result<Tensor> {
    let raw: Vec<RawValue> = arguments.iter().map(Value::raw).collect();
    let mut result = null_mut();
    check(unsafe { semitone_call(c_string(op).as_ptr(), raw.as_ptr(), raw.len(), &mut result, 1, null_mut()) })?;
    Ok(Tensor(result))
}

/// Sets grad mode when it is dropped, also by a panic.
struct GradMode(i32);
impl Drop for GradMode {
    fn drop(&mut self) {
        unsafe { semitone_set_grad_enabled(self.0, null_mut()) };
    }
}

/// Runs a function whose operators autograd does not record.
pub fn no_grad<T>(body: impl FnOnce() -> T) -> T {
    let mut before = 0;
    unsafe { semitone_set_grad_enabled(0, &mut before) };
    let _restored = GradMode(before);
    body()
}
