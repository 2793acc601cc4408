// SPDX-License-Identifier: MIT OR Apache-2.0
/* sk_use_task_frag: a socket may be used in softirq, where the task's page must not be. */
#include <net/sock.h>

static inline void probe(struct sock *sk)
{
	sk->sk_use_task_frag = false;
}
