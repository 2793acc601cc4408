// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * The module, the link type of `rdma link add NAME type iwarp netdev DEVICE`, and notifications of
 * network devices.
 *
 * Devices have siw's driver number, so that rdma-core's provider for siw accepts them. If both
 * modules were loaded, each would treat the other's devices as its own. So this module refuses to
 * be loaded beside siw, and prevents siw from being loaded.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kobject.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/string.h>
#include <rdma/rdma_netlink.h>

#include "rnic.h"

#define OTHER_DRIVER "siw"

struct workqueue_struct *rnic_wq;
struct workqueue_struct *rnic_send_wq;
struct workqueue_struct *rnic_cm_wq;

static int set_revision(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, 1, 2);
}

static const struct kernel_param_ops revision_ops = {
	.set = set_revision,
	.get = param_get_uint,
};

unsigned int rnic_mpa_revision = 2;
module_param_cb(mpa_revision, &revision_ops, &rnic_mpa_revision, 0644);
MODULE_PARM_DESC(mpa_revision, "MPA revision of requests, 1 or 2");
bool rnic_mpa_crc = true;
module_param_named(mpa_crc, rnic_mpa_crc, bool, 0644);
MODULE_PARM_DESC(mpa_crc, "Request CRCs; they are used if either side requests them");
bool rnic_mpa_markers;
module_param_named(mpa_markers, rnic_mpa_markers, bool, 0644);
MODULE_PARM_DESC(mpa_markers, "Request that the peer sends markers");
bool rnic_peer_to_peer = true;
module_param_named(peer_to_peer, rnic_peer_to_peer, bool, 0644);
MODULE_PARM_DESC(peer_to_peer,
		 "Request the peer-to-peer model, in which either side may send first");
unsigned int rnic_rnr_wait_ms = 2000;
module_param_named(rnr_wait_ms, rnic_rnr_wait_ms, uint, 0644);
MODULE_PARM_DESC(rnr_wait_ms,
		 "Milliseconds that a Send waits for a receive; 0: the connection ends at once");

/* Every loaded module has an entry in /sys/module. */
static bool other_driver_is_loaded(void)
{
	struct kobject *entry = kset_find_obj(THIS_MODULE->mkobj.kobj.kset, OTHER_DRIVER);

	kobject_put(entry);
	return entry;
}

static int module_event(struct notifier_block *block, unsigned long state, void *data)
{
	const struct module *module = data;

	if (state != MODULE_STATE_COMING || strcmp(module->name, OTHER_DRIVER))
		return NOTIFY_DONE;
	pr_err(OTHER_DRIVER " cannot be loaded beside this module: rmmod " KBUILD_MODNAME
	       " first\n");
	return notifier_from_errno(-EBUSY);
}

static struct notifier_block module_notifier = {
	.notifier_call = module_event,
};

/* Notifies programs when the port becomes active or inactive. */
static void port_event(struct rnic_device *device)
{
	struct ib_event event = {
		.device = &device->base,
		.element.port_num = RNIC_PORT,
	};
	bool active = rnic_link_is_up(device->netdev);

	if (device->active == active)
		return;
	device->active = active;
	event.event = active ? IB_EVENT_PORT_ACTIVE : IB_EVENT_PORT_ERR;
	ib_dispatch_event(&event);
}

static int netdev_event(struct notifier_block *block, unsigned long what, void *data)
{
	struct net_device *netdev = netdev_notifier_info_to_dev(data);
	struct ib_device *found = ib_device_get_by_netdev(netdev, RDMA_DRIVER_SIW);
	struct rnic_device *device;

	if (!found)
		return NOTIFY_DONE;
	device = to_device(found);
	switch (what) {
	case NETDEV_UP:
	case NETDEV_DOWN:
	case NETDEV_CHANGE:
		port_event(device);
		break;
	case NETDEV_CHANGENAME:
		strscpy(device->base.iw_ifname, netdev->name, sizeof(device->base.iw_ifname));
		break;
	/*
	 * This event also occurs when the network device moves to another network namespace. Its
	 * addresses and connections do not move with it, so the RDMA device is removed.
	 */
	case NETDEV_UNREGISTER:
		ib_unregister_device_queued(&device->base);
		break;
	}
	ib_device_put(found);
	return NOTIFY_OK;
}

static struct notifier_block netdev_notifier = {
	.notifier_call = netdev_event,
};

/* Refuses a second RDMA device for a network device. */
static int new_link(const char *name, struct net_device *netdev)
{
	/* rdma_netlink does not serialize these calls. */
	static DEFINE_MUTEX(mutex);
	struct ib_device *existing;
	int result = -EEXIST;

	mutex_lock(&mutex);
	existing = ib_device_get_by_netdev(netdev, RDMA_DRIVER_SIW);
	if (existing)
		ib_device_put(existing);
	else
		result = rnic_device_add(name, netdev);
	mutex_unlock(&mutex);
	return result;
}

static struct rdma_link_ops link_ops = {
	.type = "iwarp",
	.newlink = new_link,
};

static void free_queues(void)
{
	if (rnic_wq)
		destroy_workqueue(rnic_wq);
	if (rnic_send_wq)
		destroy_workqueue(rnic_send_wq);
	if (rnic_cm_wq)
		destroy_workqueue(rnic_cm_wq);
}

static int __init rnic_init(void)
{
	int result = -ENOMEM;

	rnic_wq = alloc_workqueue("iwarp_rnic", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	/*
	 * The kernel may be able to free memory only after this module has sent data. So sending
	 * must not be queued behind work items that allocate memory.
	 */
	rnic_send_wq = alloc_workqueue("iwarp_rnic_tx", WQ_UNBOUND | WQ_MEM_RECLAIM, 0);
	rnic_cm_wq = alloc_ordered_workqueue("iwarp_rnic_cm", WQ_MEM_RECLAIM);
	if (!rnic_wq || !rnic_send_wq || !rnic_cm_wq)
		goto no_notifier;
	result = register_module_notifier(&module_notifier);
	if (result)
		goto no_notifier;
	/*
	 * Checked after the notifier is registered, so that the other module cannot be loaded in
	 * between.
	 */
	if (other_driver_is_loaded()) {
		pr_err("cannot be loaded beside " OTHER_DRIVER
		       ", which has the same driver number: rmmod " OTHER_DRIVER " first\n");
		result = -EBUSY;
		goto no_net;
	}
	result = rnic_net_init();
	if (result)
		goto no_net;
	result = register_netdevice_notifier(&netdev_notifier);
	if (result)
		goto no_netdev;
	rdma_link_register(&link_ops);
	return 0;
no_netdev:
	rnic_net_exit();
no_net:
	unregister_module_notifier(&module_notifier);
no_notifier:
	free_queues();
	return result;
}

static void __exit rnic_exit(void)
{
	rdma_link_unregister(&link_ops);
	unregister_netdevice_notifier(&netdev_notifier);
	ib_unregister_driver(RDMA_DRIVER_SIW);
	rnic_net_exit();
	unregister_module_notifier(&module_notifier);
	free_queues();
	if (iwarp_live())
		pr_err("%ld allocations of the engine were not freed\n", iwarp_live());
	else
		pr_info("unloaded, no allocation of the engine is left\n");
}

module_init(rnic_init);
module_exit(rnic_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("iWARP RDMA in software");
MODULE_ALIAS_RDMA_LINK("iwarp");
