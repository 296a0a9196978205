// A linear model learns y = 3x + 1 in fp16 with dynamic loss scaling. It needs no package:
//
//     mcs Semitone.cs Linear.cs -out:linear.exe && LD_LIBRARY_PATH=DIR/lib mono linear.exe
using System;
using System.Linq;
using Semitone;

/// A tensor for programs without TorchSharp.
sealed class SmallTensor
{
    public readonly IntPtr Handle;

    public SmallTensor(IntPtr handle) { Handle = handle; }

    public SmallTensor(float[] data, params long[] sizes)
    {
        Native.Check(Native.semitone_tensor_create(data, Native.Size(4 * data.Length), Dtype.Float32, sizes, Native.Size(sizes.Length), out Handle));
    }

    ~SmallTensor() { Native.semitone_tensor_destroy(Handle); }

    /// Calls an operator of LibTorch with one result. Arguments are tensors and numbers.
    public static SmallTensor Call(string op, params object[] arguments)
    {
        var values = arguments.Select(argument => argument is SmallTensor
            ? new Native.Value { Kind = 1, Content = ((SmallTensor)argument).Handle.ToInt64() }
            : new Native.Value { Kind = 3, Content = BitConverter.DoubleToInt64Bits((double)argument) }).ToArray();
        IntPtr result;
        Native.Check(Native.semitone_call(Native.Utf8(op), values, Native.Size(values.Length), out result, Native.Size(1), IntPtr.Zero));
        GC.KeepAlive(arguments);
        return new SmallTensor(result);
    }

    public float Item()
    {
        var data = new float[1];
        Native.Check(Native.semitone_tensor_read(Handle, data, Native.Size(4)));
        GC.KeepAlive(this);
        return data[0];
    }
}

static class Program
{
    static int Main()
    {
        var x = Enumerable.Range(0, 64).Select(i => i / 64f).ToArray();
        var input = new SmallTensor(x, 64, 1);
        var target = new SmallTensor(x.Select(value => 3 * value + 1).ToArray(), 64, 1);
        var parameters = new[] { new SmallTensor(new[] { 0f }, 1, 1), new SmallTensor(new[] { 0f }, 1) };
        var handles = parameters.Select(parameter => parameter.Handle).ToArray();
        foreach (var handle in handles) Native.Check(Native.semitone_tensor_set_requires_grad(handle, 1));

        var skipped = 0;
        double scale;
        using (var policy = new Policy("semitone", "cpu", Dtype.Float16).KeepFp32("softmax"))
        using (var scaler = new Scaler("torch", ("init_scale", 65536)))
        {
            for (var step = 0; step < 300; ++step)
            {
                foreach (var handle in handles) Native.Check(Native.semitone_tensor_set_grad(handle, IntPtr.Zero));
                SmallTensor loss;
                using (policy.Enter())
                {
                    var output = SmallTensor.Call("aten::linear", input, parameters[0], parameters[1]);
                    loss = SmallTensor.Call("aten::mse_loss", output, target);
                }
                var scaled = new SmallTensor(scaler.Scale(loss.Handle));
                Native.Check(Native.semitone_tensor_backward(scaled.Handle));
                GC.KeepAlive(loss);
                GC.KeepAlive(scaled);
                if (scaler.Unscale(handles))
                {
                    ++skipped;
                }
                else
                {
                    int before;
                    Native.Check(Native.semitone_set_grad_enabled(0, out before));
                    foreach (var parameter in parameters)
                    {
                        IntPtr grad;
                        Native.Check(Native.semitone_tensor_grad(parameter.Handle, out grad));
                        SmallTensor.Call("aten::add_.Tensor", parameter, new SmallTensor(grad), -0.5);
                    }
                    Native.Check(Native.semitone_set_grad_enabled(before, out before));
                }
                scaler.Update();
            }
            scale = scaler.GetScale();
        }
        float slope = parameters[0].Item(), offset = parameters[1].Item();
        Console.WriteLine("y = {0:F2} x + {1:F2}, {2} steps skipped, the scale is {3}", slope, offset, skipped, scale);
        try
        {
            SmallTensor.Call("aten::no_such_operator");
            return 1;
        }
        catch (SemitoneException error) when (error.Status == 1 && error.Message.Contains("expected an operator of LibTorch"))
        {
        }
        return Math.Abs(slope - 3) < 0.1 && Math.Abs(offset - 1) < 0.1 && skipped > 0 ? 0 : 1;
    }
}
