// SPDX-License-Identifier: MIT OR Apache-2.0
/* kernel_bind() and kernel_connect() take a struct sockaddr_unsized. */
#include <linux/net.h>

static inline int probe(struct socket *socket, struct sockaddr_unsized *address)
{
	return kernel_bind(socket, address, 0) + kernel_connect(socket, address, 0, 0);
}
