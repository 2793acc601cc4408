// SPDX-License-Identifier: MIT OR Apache-2.0
/* Kernel sockets have a tracker of their network namespace, too. */
#include <net/sock.h>

static inline void probe(struct sock *sk)
{
	__netns_tracker_free(sock_net(sk), &sk->ns_tracker, false);
}
