// SPDX-License-Identifier: MIT OR Apache-2.0
/* ib_umem_get_va(), which replaces ib_umem_get(). */
#include <rdma/ib_umem.h>

static inline struct ib_umem *probe(struct ib_device *device)
{
	return ib_umem_get_va(device, 0, 0, 0);
}
