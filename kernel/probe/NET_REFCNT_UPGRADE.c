// SPDX-License-Identifier: MIT OR Apache-2.0
/* sk_net_refcnt_upgrade(): a kernel socket starts to hold its network namespace. */
#include <net/sock.h>

static inline void probe(struct sock *sk)
{
	sk_net_refcnt_upgrade(sk);
}
