// Semitone for C#: policies, regions, loss scaling and master weights of libsemitone_c.
//
// Tensors are pointers to C++'s at::Tensor: `tensor.Handle` of TorchSharp. A result is a new at::Tensor
// that belongs to the caller: `torch.Tensor.UnsafeCreateTensor(pointer)` makes a Tensor that deletes it.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Runtime.InteropServices;
using System.Text;

namespace Semitone
{
    public class SemitoneException : Exception
    {
        public int Status { get; }
        public SemitoneException(int status, string message) : base(message) { Status = status; }
    }

    public static class Dtype
    {
        public const int Float16 = 5, Float32 = 6, BFloat16 = 15;
    }

    /// The functions of semitone/c/semitone.h.
    internal static class Native
    {
        private const string Library = "semitone_c";

        [StructLayout(LayoutKind.Sequential)]
        internal struct Option
        {
            public IntPtr Name;
            public double Value;
        }

        /// An argument of semitone_call. `Content` is a tensor, or the bits of a number.
        [StructLayout(LayoutKind.Sequential)]
        internal struct Value
        {
            public int Kind;
            public UIntPtr Count;
            public long Content;
        }

        [DllImport(Library)] internal static extern IntPtr semitone_last_error();
        [DllImport(Library)] internal static extern int semitone_tensor_create(float[] data, UIntPtr bytes, int dtype, long[] sizes, UIntPtr dims, out IntPtr tensor);
        [DllImport(Library)] internal static extern int semitone_tensor_destroy(IntPtr tensor);
        [DllImport(Library)] internal static extern int semitone_tensor_read(IntPtr tensor, float[] data, UIntPtr bytes);
        [DllImport(Library)] internal static extern int semitone_tensor_set_requires_grad(IntPtr tensor, int requiresGrad);
        [DllImport(Library)] internal static extern int semitone_tensor_grad(IntPtr tensor, out IntPtr grad);
        [DllImport(Library)] internal static extern int semitone_tensor_set_grad(IntPtr tensor, IntPtr grad);
        [DllImport(Library)] internal static extern int semitone_tensor_backward(IntPtr tensor);
        [DllImport(Library)] internal static extern int semitone_set_grad_enabled(int enabled, out int before);
        [DllImport(Library)] internal static extern int semitone_call(byte[] op, Value[] arguments, UIntPtr argumentCount, out IntPtr result, UIntPtr capacity, IntPtr count);
        [DllImport(Library)] internal static extern int semitone_policy_create(byte[] preset, byte[] device, int dtype, out IntPtr policy);
        [DllImport(Library)] internal static extern int semitone_policy_destroy(IntPtr policy);
        [DllImport(Library)] internal static extern int semitone_policy_set(IntPtr policy, byte[] op, int action);
        [DllImport(Library)] internal static extern int semitone_region_enter(IntPtr policy, out IntPtr region);
        [DllImport(Library)] internal static extern int semitone_region_exit(IntPtr region);
        [DllImport(Library)] internal static extern int semitone_scaler_create(byte[] preset, Option[] options, UIntPtr optionCount, out IntPtr scaler);
        [DllImport(Library)] internal static extern int semitone_scaler_destroy(IntPtr scaler);
        [DllImport(Library)] internal static extern int semitone_scaler_scale(IntPtr scaler, IntPtr loss, out IntPtr scaled);
        [DllImport(Library)] internal static extern int semitone_scaler_unscale(IntPtr scaler, IntPtr[] parameters, UIntPtr count, out int foundInf);
        [DllImport(Library)] internal static extern int semitone_scaler_update(IntPtr scaler);
        [DllImport(Library)] internal static extern int semitone_scaler_get_scale(IntPtr scaler, out double scale);
        [DllImport(Library)] internal static extern int semitone_masters_create(IntPtr[] parameters, UIntPtr count, out IntPtr masters);
        [DllImport(Library)] internal static extern int semitone_masters_destroy(IntPtr masters);
        [DllImport(Library)] internal static extern int semitone_masters_list(IntPtr masters, IntPtr[] tensors, UIntPtr count);
        [DllImport(Library)] internal static extern int semitone_masters_take_gradients(IntPtr masters);
        [DllImport(Library)] internal static extern int semitone_masters_clear_gradients(IntPtr masters);
        [DllImport(Library)] internal static extern int semitone_masters_write_model(IntPtr masters);

        internal static void Check(int status)
        {
            if (status == 0) return;
            var message = semitone_last_error();
            var bytes = new List<byte>();
            for (var i = 0; Marshal.ReadByte(message, i) != 0; ++i) bytes.Add(Marshal.ReadByte(message, i));
            throw new SemitoneException(status, Encoding.UTF8.GetString(bytes.ToArray()));
        }

        internal static byte[] Utf8(string text) { return Encoding.UTF8.GetBytes(text + "\0"); }
        internal static UIntPtr Size(int count) { return (UIntPtr)(uint)count; }
    }

    /// Which operators run in 16 bits.
    public sealed class Policy : IDisposable
    {
        private IntPtr handle;

        public Policy(string preset, string device, int dtype)
        {
            Native.Check(Native.semitone_policy_create(Native.Utf8(preset), Native.Utf8(device), dtype, out handle));
        }

        public Policy KeepFp32(string op)
        {
            Native.Check(Native.semitone_policy_set(handle, Native.Utf8(op), 1));
            return this;
        }

        /// Until the region is disposed of, operators of this thread run under the policy. Dispose of regions
        /// in the reverse order, on the thread that entered them: not across an `await`.
        public Region Enter()
        {
            IntPtr region;
            Native.Check(Native.semitone_region_enter(handle, out region));
            return new Region(region);
        }

        public void Dispose()
        {
            Native.Check(Native.semitone_policy_destroy(handle));
            handle = IntPtr.Zero;
        }
    }

    public sealed class Region : IDisposable
    {
        private IntPtr handle;
        internal Region(IntPtr region) { handle = region; }
        public void Dispose()
        {
            if (handle == IntPtr.Zero) return;
            Native.Check(Native.semitone_region_exit(handle));
            handle = IntPtr.Zero;
        }
    }

    /// A loss scale.
    public sealed class Scaler : IDisposable
    {
        private IntPtr handle;

        public Scaler(string preset, params (string name, double value)[] options)
        {
            var raw = options.Select(option => new Native.Option { Name = Marshal.StringToHGlobalAnsi(option.name), Value = option.value }).ToArray();
            try
            {
                Native.Check(Native.semitone_scaler_create(Native.Utf8(preset), raw, Native.Size(raw.Length), out handle));
            }
            finally
            {
                foreach (var option in raw) Marshal.FreeHGlobal(option.Name);
            }
        }

        /// Returns loss * scale: a new at::Tensor.
        public IntPtr Scale(IntPtr loss)
        {
            IntPtr scaled;
            Native.Check(Native.semitone_scaler_scale(handle, loss, out scaled));
            return scaled;
        }

        /// Unscales the gradients of parameters. Returns whether the step has to be skipped.
        public bool Unscale(IntPtr[] parameters)
        {
            int foundInf;
            Native.Check(Native.semitone_scaler_unscale(handle, parameters, Native.Size(parameters.Length), out foundInf));
            return foundInf != 0;
        }

        public void Update() { Native.Check(Native.semitone_scaler_update(handle)); }

        public double GetScale()
        {
            double scale;
            Native.Check(Native.semitone_scaler_get_scale(handle, out scale));
            return scale;
        }

        public void Dispose()
        {
            Native.Check(Native.semitone_scaler_destroy(handle));
            handle = IntPtr.Zero;
        }
    }

    /// fp32 masters of 16-bit parameters.
    public sealed class Masters : IDisposable
    {
        private IntPtr handle;
        private readonly int count;

        public Masters(IntPtr[] parameters)
        {
            count = parameters.Length;
            Native.Check(Native.semitone_masters_create(parameters, Native.Size(count), out handle));
        }

        /// Returns the tensors that the optimizer is to update: new at::Tensors.
        public IntPtr[] List()
        {
            var tensors = new IntPtr[count];
            Native.Check(Native.semitone_masters_list(handle, tensors, Native.Size(count)));
            return tensors;
        }

        public void TakeGradients() { Native.Check(Native.semitone_masters_take_gradients(handle)); }
        public void ClearGradients() { Native.Check(Native.semitone_masters_clear_gradients(handle)); }
        public void WriteModel() { Native.Check(Native.semitone_masters_write_model(handle)); }

        public void Dispose()
        {
            Native.Check(Native.semitone_masters_destroy(handle));
            handle = IntPtr.Zero;
        }
    }
}
