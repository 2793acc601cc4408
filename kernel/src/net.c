// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * Network namespaces: which devices are in one, and which sockets hold one.
 *
 * A device lives in the namespace in which its link was created, and ends with it. Sockets in use
 * do not hold the namespace: a program elsewhere that listens on all devices must not keep it
 * alive. When the namespace ends, its devices are removed, which closes their sockets.
 *
 * A closed socket holds the namespace until TCP has delivered its last data. TCP stops the timers
 * of a closed socket that does not, so a lost segment would never be sent again, and the socket
 * would never be freed.
 */
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <net/net_namespace.h>
#include <net/sock.h>

#include "rnic.h"

/* Guards the list of devices. */
static DEFINE_SPINLOCK(devices_lock);
static LIST_HEAD(devices);
static DECLARE_WAIT_QUEUE_HEAD(device_removed);

/* The caller holds the namespace until the device is registered. */
void rnic_net_add(struct rnic_device *device)
{
	spin_lock(&devices_lock);
	list_add(&device->entry, &devices);
	spin_unlock(&devices_lock);
}

/* Called when nothing uses the device any more. */
void rnic_net_remove(struct rnic_device *device)
{
	spin_lock(&devices_lock);
	list_del(&device->entry);
	spin_unlock(&devices_lock);
	wake_up(&device_removed);
}

/* Called with the lock. */
static struct rnic_device *find_device(const struct net *net)
{
	struct rnic_device *device;

	list_for_each_entry(device, &devices, entry)
		if (device->net == net)
			return device;
	return NULL;
}

static bool is_listed(const struct net *net, const struct rnic_device *wanted)
{
	const struct rnic_device *device;
	bool found = false;

	spin_lock(&devices_lock);
	list_for_each_entry(device, &devices, entry)
		found |= device == wanted && device->net == net;
	spin_unlock(&devices_lock);
	return found;
}

/*
 * Removes the devices of a namespace that ends, and waits until they are gone. This runs before the
 * network devices of the namespace are removed or moved, and without the RTNL.
 */
static void __net_exit net_ends(struct net *net)
{
	struct rnic_device *device;
	bool ours;

	for (;;) {
		spin_lock(&devices_lock);
		device = find_device(net);
		/* This fails if another thread is removing the device. */
		ours = device && ib_device_try_get(&device->base);
		spin_unlock(&devices_lock);
		if (!device)
			return;
		if (ours)
			ib_unregister_device_and_put(&device->base);
		else
			wait_event(device_removed, !is_listed(net, device));
	}
}

static struct pernet_operations net_ops = {
	.exit = net_ends,
};

int rnic_net_init(void)
{
	return register_pernet_device(&net_ops);
}

void rnic_net_exit(void)
{
	unregister_pernet_device(&net_ops);
}

/* Creates a socket in the namespace of the device, for the family of an address. */
int rnic_create_socket(struct ib_device *base, const struct sockaddr_storage *address,
		       struct socket **socket)
{
	int result = sock_create_kern(to_device(base)->net, address->ss_family, SOCK_STREAM,
				      IPPROTO_TCP, socket);

	if (result)
		*socket = NULL;
	return result;
}

/*
 * Closes the socket of a connection. TCP delivers the queued data by itself, or resets the
 * connection if `reset` is set or the namespace is ending. May sleep.
 */
void rnic_close_socket(struct socket *socket, bool reset)
{
	struct sock *sk = socket->sk;
	struct net *net = reset ? NULL : maybe_get_net(sock_net(sk));

	if (net) {
		lock_sock(sk);
		rnic_upgrade_net_ref(sk);
		release_sock(sk);
	} else {
		sock_no_linger(sk);
	}
	sock_release(socket);
	if (net)
		put_net(net);
}
