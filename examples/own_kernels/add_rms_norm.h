// The kernel of examples/own_pass.py. Generated code includes it behind step.h, so all that our own kernels use is there.
#pragma once

namespace inferc {

// out = residual + rms_norm(x), the norm rounded to T first, as the two ops would.
template <class T>
KERNEL void add_rms_norm(Team& team, Rows<const T> x, Rows<const T> residual, const T* weight, Norm norm, i64 rows, i64 width,
                         Rows<T> out) {
  team.each(rows, row_grain(width), [&](i64 begin, i64 end) {
    for (i64 row = begin; row < end; ++row) {
      norm_row(x[row], weight, norm, width, out[row]);
      for (i64 i = 0; i < width; i += LANES)
        store(out[row] + i, add(load(residual[row] + i, width - i), load(out[row] + i, width - i)), width - i);
    }
  });
}

}  // namespace inferc
