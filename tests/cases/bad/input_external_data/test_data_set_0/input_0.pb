 Bqueryj 
location../../../outside.binp